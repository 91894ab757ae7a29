"""Every option of a training run: its name, default, reason and check.

One frozen dataclass, of which the parser of `python -m fsdp2.train` is made; a `--config` file holds the same names. It
is checked here, at construction, and what needs the machine or its files (data, run directory) in `run/preflight.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fsdp2 import data, models
from fsdp2.options import own_model
from fsdp2.options.checks import FALLING, KEEP, check_together
from fsdp2.options.own_model import unset
from fsdp2.options.parser import flags_of_table, make_parser, read_values
from fsdp2.options.strategies import STRATEGIES, check_strategy
from fsdp2.options.values import (
    TRACKERS,
    betas,
    chat_fields,
    check_values,
    dataset_name,
    granularity,
    groups_ahead,
    location,
    model_name,
    number,
    one_of,
    option,
    optional_switch,
    or_off,
    patterns,
    reshard_policy,
    resume_place,
    steps_or_never,
    steps_or_share,
    switch,
    tags,
    text,
    trackers,
    whole,
)
from fsdp2.parallel import ACCUMULATION_SYNC, DTYPES, FLOAT8, FSDP1_PREFETCH, FSDP1_SHARDING, OPTIMIZERS, STATES
from fsdp2.units import byte_count

if TYPE_CHECKING:
    from fsdp2.models.spec import ModelSpec

TRAIN = "Train a sharded model with PyTorch FSDP2. On several ranks: torchrun --nproc_per_node N -m fsdp2.train."
SCHEDULES = ("step", *FALLING, "constant")


@dataclass(frozen=True)
class Config:
    """The options of one run. Raises ConfigError, naming the flag and the fix, if they make no sense."""

    model: str = option(
        "vit",
        "a built-in model, a transformers folder or name, a timm name, or your function that returns a model",
        model_name(models.NAMES),
        metavar="|".join([*models.NAMES, "hf:DIR_OR_NAME", "timm:NAME", "MODULE:FUNCTION"]),
        section="model and data",
    )
    trust_remote_code: bool = option(False, "with --model hf:, run the Python files that come with the model", switch)
    model_size: str = option(None, "a name from the model's table; unset = the first", text)
    dataset: str = option(
        None,
        "unset = digits for images, source-text for language; text:PATH = your own (.txt, .jsonl, .parquet, a folder, "
        "or what python -m fsdp2.data prepare made), chat:PATH = conversations (.jsonl, .parquet, .json), "
        "datasets:PATH[:SPLIT] = what Hugging Face's datasets reads, also OWNER/NAME on the hub; several by "
        "commas, perhaps with shares, text:PATH@0.7,chat:PATH@0.3",
        dataset_name(data.NAMES, data.OWN),
        metavar="NAME",
    )
    eval_dataset: str | None = option(
        None,
        "evaluate this text:, chat: or datasets:, and train on all of --dataset; without it a tenth is held out",
        or_off(dataset_name((), data.OWN)),
        metavar="NAME",
    )
    bad_samples: str = option(
        "refuse", "conversations that are too long, teach no answer, or can't be read", one_of("refuse", "drop")
    )
    tokenizer: str | None = option(
        None,
        "for text, a tokenizer.json or its folder, or the word bytes; unset = the model's own, else bytes",
        location,
    )
    text_field: str = option("text", "for text: and datasets:, the field or column that holds the text", text)
    chat_fields: str | None = option(
        None, "how conversations name their fields and roles: OURS=THEIRS,…; ; between sources", or_off(chat_fields)
    )
    bos: str = option("auto", "begin each document of text with a token; auto = as its tokenizer", one_of(*data.BOS))
    documents: str = option(
        "apart", "for data of your own, whether documents in one sequence see each other", one_of("apart", "together")
    )
    data_root: str | None = option(None, "folder with torchvision's layout; unset = each node downloads once", location)
    seq_len: int = option(None, "language: tokens in a sequence" + unset("seq_len"), whole(1, 2**20))

    epochs: int = option(None, "passes over the data" + unset("epochs"), whole(1), section="steps and batches")
    max_steps: int | None = option(None, "stop after this many optimizer steps, evaluate and save", whole(1))
    eval_every: int | None = option(None, "also evaluate after each N optimizer steps of an epoch", or_off(whole(1)))
    batch_size: int = option(None, "samples per rank and microbatch" + unset("batch_size") + " of language", whole(1))
    global_batch_size: int | None = option(
        None, "samples a step, at most --batch-size a microbatch; unset = that x ranks x accumulation", whole(1)
    )
    test_batch_size: int = option(None, "samples per forward in evaluation; unset = 1000, or of text a batch", whole(1))
    loader_workers: int = option(0, "processes per rank that prepare batches; 0 = the training's own", whole(0, 256))
    seed: int = option(1, "seed of initial values, sample order and dropout", whole(0, 2**63 - 1))

    optimizer: str = option(
        None,
        "how parameters are updated; sgd has momentum 0.9" + unset("optimizer"),
        one_of(*OPTIMIZERS),
        section="optimizer and schedule",
    )
    lr: float = option(None, "learning rate" + unset("lr"), number(0, 1000, open_minimum=True))
    fused_optimizer: bool | None = option(
        None, "one kernel for the whole update; unset = on a GPU, where the optimizer has one", optional_switch
    )
    optimizer_state: str | None = option(None, "adam, adamw: bits of moments (extra torchao)", or_off(one_of(*STATES)))
    gamma: float = option(0.85, "factor on the rate after each epoch (StepLR)", number(0, 1, open_minimum=True))
    betas: tuple[float, float] | None = option(
        None, "adam, adamw: decay of the averages of gradients and of their squares; unset = 0.9,0.999", betas
    )
    weight_decay: float | None = option(
        None, "adamw: decay of parameters with two dimensions or more; unset = 0.01, of all parameters", number(0, 100)
    )
    schedule: str = option(
        None,
        "how the learning rate falls: step = by --gamma after each epoch; cosine and linear = to --lr-floor at the end"
        + unset("schedule"),
        one_of(*SCHEDULES),
    )
    warmup_steps: float = option(None, "steps of a rising rate, or their share" + unset("warmup_steps"), steps_or_share)
    lr_floor: float = option(0.0, "cosine, linear: the last learning rate, as a fraction of --lr", number(0, 1))
    ema: float | None = option(None, "keep a moving average of weights, of this decay", or_off(number(0, 0.9999999)))
    clip_grad_norm: float | None = option(
        "auto",
        "clip the gradients to this norm; bare = 1.0; auto = off, from weights 1.0",
        or_off(number(0, 1e30, open_minimum=True)),
        bare=1.0,
    )
    grad_accumulation: int = option(1, "microbatches per step; with --global-batch-size at least", whole(1, 2**16))
    grad_accumulation_sync: str = option(
        "every",
        "reduce-scatter gradients with every microbatch, or once with the last; replica = HSDP: every, but all-reduce "
        "over replicas with the last",
        one_of(*ACCUMULATION_SYNC),
    )
    freeze: tuple[str, ...] = option(
        (), "name pattern of parameters that are not trained; repeatable", patterns, many=True, section="fine-tuning"
    )
    lora: int | None = option(None, "train adapters of this rank, not weights (extra peft)", or_off(whole(1, 65536)))
    lora_alpha: float | None = option(
        None, "LoRA: adapters are scaled by alpha / rank; unset = 2 x rank", number(0, 1e6, open_minimum=True)
    )
    lora_targets: tuple[str, ...] = option(
        (), "LoRA: name pattern of linear layers; repeatable; unset = all in blocks", patterns, many=True
    )
    lora_dropout: float = option(0.0, "LoRA: share of an adapter's inputs that training drops", number(0, 0.99))

    strategy: str = option(
        "fsdp2",
        "how ranks share the model; none trains without sharding, on one rank",
        one_of(*STRATEGIES),
        section="sharding",
    )
    replicas: int = option(1, "HSDP: copies of the sharded model; must divide the world size", whole(1))
    tp: int = option(1, "tensor parallel: ranks that split each layer between them, beside FSDP2", whole(1))
    sp: int = option(1, "sequence parallel: ranks that have a piece of each sequence, beside FSDP2", whole(1))
    shard_modules: tuple[str, ...] = option(
        (), "name pattern of the blocks, instead of finding them; repeatable", patterns, many=True
    )
    shard_granularity: int | str = option(1, "gathered together: N blocks, each layer, or all (root)", granularity)
    reshard_after_forward: bool | int | None = option(
        None,
        "free parameters between forward and backward: true = of all groups, false = of none, N = keep them sharded "
        "over N ranks; unset or auto = of all but the root and the last group",
        reshard_policy,
    )
    explicit_prefetching: int | None = option(
        None, "all-gather N groups ahead, forward and backward; bare = 2", or_off(whole(1)), bare=2
    )
    forward_prefetch: int | Literal["off"] | None = option(
        None, "groups ahead in forward, or off; unset = as --explicit-prefetching", groups_ahead
    )
    backward_prefetch: int | Literal["off"] | None = option(
        None, "groups ahead in backward, or off; unset = as --explicit-prefetching", groups_ahead
    )

    bucket_mb: float | None = option(
        None,
        "DDP, ZeRO: MiB of gradients in one exchange; unset = 25",
        number(0, 2**20, open_minimum=True),
        section="baselines: DDP, FSDP1, DeepSpeed ZeRO",
    )
    fsdp1_sharding: str = option("full-shard", "FSDP1's sharding strategy", one_of(*FSDP1_SHARDING))
    min_wrap_params: int | None = option(
        None, "FSDP1: wrap modules with at least this many parameters; unset = each block", whole(1, 10**15)
    )
    fsdp1_backward_prefetch: str = option(
        "pre", "FSDP1: all-gather the next unit before or after a backward, or never", one_of(*FSDP1_PREFETCH)
    )
    overlap_comm: bool = option(False, "ZeRO: exchange gradients during backward", switch)
    deepspeed_config: str | None = option(
        None, "ZeRO: a DeepSpeed configuration that overrides the one made from the flags", location
    )
    nvme_offload: str | None = option(None, "ZeRO-3: parameters and optimizer state in files of this folder", location)

    mixed_precision: Literal["bf16", "fp16"] | None = option(
        None,
        "dtype of forward and backward; bare = bf16; fp16 comes with a gradient scaler",
        or_off(one_of("bf16", "fp16")),
        bare="bf16",
        section="precision, memory, speed",
    )
    float8: str | None = option(None, "products of blocks' linear layers (extra torchao)", or_off(one_of(*FLOAT8)))
    reduce_dtype: str = option("fp32", "dtype of the gradient reduction", one_of(*DTYPES))
    cpu_offload: bool = option(False, "keep parameters, gradients and optimizer state in CPU memory", switch)
    activation_checkpointing: Literal["block", "op"] | None = option(
        None,
        "recompute activations in backward; bare = block; op = keep the results of matmuls",
        or_off(one_of("block", "op")),
        bare="block",
    )
    chunked_loss: int | None = option(
        None,
        "compute the logits of at most this many tokens at a time, and recompute them in backward; bare = 1024",
        or_off(whole(1)),
        bare=1024,
    )
    compile: bool = option(False, "torch.compile each block", switch)
    attention: str = option(
        "auto", "kernel; auto = as torch chooses, and flex for documents apart on a GPU", one_of(*models.ATTENTIONS)
    )

    device: str = option(
        "auto", "where to train; auto = on a GPU, if there is one", one_of("auto", "cpu", "cuda"), section="machine"
    )
    # 100,000 threads make OpenMP crash the process; with 4,096 on 2 cores a step takes minutes.
    threads: int | None = option(None, "CPU threads a rank; unset = OMP_NUM_THREADS, or cores / ranks", whole(1, 1024))
    doctor: bool = option(False, "examine the cluster first for some seconds, and don't train if it can't", switch)
    matmul_precision: str = option(
        "highest",
        "fp32 products on a GPU: highest = fp32, high = TF32 (faster, 10 bits of mantissa), medium = bf16",
        one_of("highest", "high", "medium"),
    )
    deterministic: bool = option(False, "only deterministic algorithms; an operation without one ends the run", switch)
    gc_every: int = option(50, "steps between garbage collections, the same on all ranks; 0 = Python's", whole(0))
    timeout: int | None = option(
        None,
        "seconds that a step, after the first, may take before the run ends as hanging; unset = 10 times the slowest "
        "of the last 16, at least 30",
        whole(1, 1800),
    )

    run_dir: str | None = option(
        None,
        "folder or URL (s3://, gs://) of the run; unset = runs/<model>-<time>",
        location,
        section="checkpoints and weights",
    )
    resume: str = option(
        "auto",
        "auto = from the newest checkpoint of the run directory, never = from the start; or a step, or the path of a "
        "checkpoint or run",
        resume_place,
    )
    checkpoint_every: int | Literal["never"] | None = option(
        None,
        "optimizer steps between checkpoints; unset = each epoch; never = none, not even at the end, for measurements",
        steps_or_never,
    )
    keep: int = option(KEEP, "number of newest checkpoints to keep; older ones are deleted", whole(1))
    keep_every: int | None = option(None, "also keep each checkpoint whose step is a multiple of N", whole(1))
    keep_best: bool = option(False, "also keep the checkpoint with the lowest loss in an evaluation", switch)
    async_checkpoint: Literal["wait", "skip"] | None = option(
        None,
        "write checkpoints in the background; bare = while one is written the next waits; skip = it is skipped",
        or_off(one_of("wait", "skip")),
        bare="wait",
    )
    memory_checkpoint: int | None = option(
        None,
        "also keep a checkpoint in each node's memory (/dev/shm) every N steps: restarted ranks resume from it, with "
        "--replicas also those of a node in a lost one's place; bare = 1",
        or_off(whole(1)),
        bare=1,
    )
    on_checkpoint_failure: str = option("stop", "when a save fails: stop, or report it", one_of("stop", "continue"))
    on_nonfinite: str = option(
        "stop",
        "when loss or gradients are NaN or infinite: stop, skip the update (each step waits for the GPU), or continue",
        one_of("stop", "skip", "continue"),
    )
    on_anomaly: str = option(
        "report",
        "when the loss or the gradient norm jumps, or replicas differ: report it, or stop",
        one_of("report", "stop"),
    )
    check_replicas: int | None = option(
        None, "HSDP, TP, DDP: every N steps and before saves, compare the bits that ranks hold alike", whole(1)
    )
    resume_partial: bool = option(False, "with --resume STEP or PATH, load only the weights that fit", switch)
    verify: str = option(
        "hash",
        "how a resume checks a checkpoint: each file's hash, while it is read, or only its size",
        one_of("hash", "size"),
    )
    init_from: str | None = option(
        None, "start from the weights of a file, a folder or a run; scratch = ignore the weights of --model", location
    )
    init_partial: bool = option(False, "with --init-from, load only the weights that fit, and list the others", switch)
    save_model: bool | None = option(
        None,
        "write full_model/ at the end, above 4 GB as safetensors by all ranks; unset = only up to 4 GB, and not with "
        "--checkpoint-every never",
        optional_switch,
    )
    dcp_api: bool = option(False, "gather full state dicts with the DCP API instead of the DTensor API", switch)
    inspect: bool = option(False, "print and check each parameter's sharding and dtype", switch, section="reports")
    memory_snapshot: bool = option(
        False, "record each allocation with its purpose; python -m fsdp2.memory RUN shows them", switch
    )
    memory_limit: int | None = option(
        None,
        "end the run, as out of memory, when a rank's tensors take more than this, such as 500MB",
        or_off(byte_count),
        metavar="BYTES",
    )
    profile: bool = option(False, "trace the first 6 steps with torch.profiler, memory included", switch)
    track: tuple[str, ...] = option(
        (), "also write to these trackers, by commas", trackers, metavar=f"{'|'.join(TRACKERS)}[,…]"
    )
    run_name: str | None = option(None, "the run's name in trackers, in place of its folder's", or_off(text))
    tag: tuple[str, ...] = option((), "a tag KEY=VALUE in trackers; repeatable", tags, metavar="KEY=VALUE", many=True)
    tensorboard: bool = option(False, "the same as --track tensorboard", switch)

    def __new__(cls, *values: Any, **words: Any) -> Config:
        flags_of_table(cls, {name.replace("_", "-"): value for name, value in words.items()}, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)
        own_model.complete(self)
        if self.save_model is None and self.lora is not None:
            object.__setattr__(self, "save_model", False)  # the adapters are what is new
        check_strategy(self)
        check_together(self)

    @property
    def spec(self) -> ModelSpec:
        """The model that `--model` names, with the adapters that `--lora` asks for and the loss of `--chunked-loss`."""
        return own_model.spec(self)

    @property
    def weights(self) -> str | None:
        """The file or folder whose weights the run starts from, unless a checkpoint takes their place."""
        return own_model.weights(self)

    def global_batch(self, world_size: int) -> int:
        """Samples in one optimizer step over all ranks."""
        return self.global_batch_size or self.batch_size * self.grad_accumulation * (world_size // self.tp // self.sp)

    def accumulation(self, world_size: int) -> int:
        """Microbatches of a rank in a step: `grad_accumulation`, or as many as keep each within `batch_size`."""
        samples = self.batch_size * (world_size // self.tp // self.sp)
        return max(self.grad_accumulation, -(-(self.global_batch_size or 0) // samples))

    @property
    def saves(self) -> bool:
        """Return whether the run writes checkpoints."""
        return self.checkpoint_every != "never"

    @property
    def writes_full_model(self) -> bool | None:
        """Return whether the run writes the full model at its end; None = unless it is large."""
        return False if self.save_model is None and not self.saves else self.save_model


def parser(prog: str = "fsdp2.train", *, description: str = TRAIN, add_help: bool = True) -> Any:
    """The argparse parser of a Config; with `add_help=False` it is a parent for a launcher's parser."""
    return make_parser(Config, prog=prog, description=description, add_help=add_help)


def parse(argv: Sequence[str] | None = None) -> Config:
    """A Config from a command line. Raises ConfigError; `--help` prints and exits."""
    return Config(**read_values(Config, vars(parser().parse_args(argv))))

"""What docs/fine-tuning.md tunes, in a new folder:  python -m tests.docs.capitals FOLDER

A tiny Llama of Hugging Face's that knows nothing, with a tokenizer and a chat template; conversations about capitals, a
set to evaluate, preference pairs, and a task for EleutherAI's harness.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

CAPITALS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo", "Cuba": "Havana", "Norway": "Oslo"}
QUESTIONS = ("{}'s capital?", "Which town rules {}?")
BEGIN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    f"{{% for one in messages %}}{BEGIN}{{{{ one.role }}}}\n{{{{ one.content }}}}{END}\n{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{BEGIN}assistant\n{{% endif %}}"
)


def files() -> dict[str, list[Any]]:
    """Name -> its lines."""
    asked = [(question.format(land), town) for land, town in CAPITALS.items() for question in QUESTIONS]
    talks: list[Any] = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": f"It is {town}."}]}
        for ask, town in asked
    ]
    choices = [f"It is {town}." for town in CAPITALS.values()]
    data = {"dataset_path": "json", "test_split": "test", "doc_to_text": "ask"}
    task = {"task": "capitals", **data, "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    return {
        "train.jsonl": random.Random(1).choices(talks, k=400),
        "dev.jsonl": talks,
        "pairs.jsonl": [{"prompt": ask, "chosen": f"{town}.", "rejected": f"It is {town}."} for ask, town in asked],
        "task/scored.jsonl": [{"ask": ask, "choices": choices, "right": f"It is {town}."} for ask, town in asked],
        "task/capitals.yaml": [{**task, "doc_to_choice": "choices", "doc_to_target": "right"}],
    }


def make(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    (folder / "task").mkdir(parents=True)
    for name, lines in files().items():
        if name.endswith(".yaml"):
            lines[0]["dataset_kwargs"] = {"data_files": {"test": str(folder / "task" / "scored.jsonl")}}
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=letters, special_tokens=[BEGIN, END])
    tokenizer.train([str(folder / "train.jsonl")], trainer)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)
    fast.save_pretrained(folder / "model")
    set_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=320, max_position_embeddings=128, eos_token_id=tokenizer.token_to_id(END), **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    print(f"made {folder}: {', '.join(['model', *files()])}")


if __name__ == "__main__":
    make(Path(sys.argv[1]))

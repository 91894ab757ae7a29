"""The speed of a GPU and of its links: the part of its table that a plan of time needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp2.options.errors import ConfigError, shown, unknown

GB = 1e9
# key -> what it says. All of these together, or none: without them memory is planned and time isn't.
NUMBERS = {
    "memory_gb_per_s": "bandwidth of the GPU's memory",
    "gpus_per_node": "GPUs that links of one machine join",
    "link_gb_per_s": "from one GPU to another of its machine, in one direction",
    "network_gb_per_s": "from one GPU to another machine, in one direction",
    "host_gb_per_s": "from the machine's memory to the GPU",
    "link_us": "latency of a link inside a machine",
    "network_us": "latency between machines",
    "spread": "by how much what runs reach differs from the efficiencies",
}
# What a CPU takes to issue one, and what that is assumed to be where a table doesn't say it.
ISSUING = {"operator_us": 8.0, "exchange_us": 50.0}
DTYPES = ("bf16", "fp16", "fp32")
EFFICIENCIES = ("matrix", "attention", "memory", "link", "network")
KEYS = (*NUMBERS, "tflops", "efficiency", *ISSUING)


@dataclass(frozen=True)
class Speed:
    """Rates of a GPU and its links.

    Attributes:
        flops: FLOP/s by dtype, of the data sheet and without sparsity.
        memory, link, network, host: bytes/s in one direction; `network` is one GPU's share of a machine's.
        link_latency, network_latency: seconds.
        efficiency: which part of a rate is reached, by what bounds an operator.
        spread: the relative error that is expected of a rate.
        operator, exchange: seconds of the CPU for an operator, and for a collective with what FSDP2 does around it.
        on_cpu: the ranks compute on the CPU that issues, which waits for each exchange: nothing overlaps.
    """

    flops: Mapping[str, float]
    memory: float
    gpus_per_node: int
    link: float
    network: float
    host: float
    link_latency: float
    network_latency: float
    efficiency: Mapping[str, float]
    spread: float
    operator: float = ISSUING["operator_us"] * 1e-6
    exchange: float = ISSUING["exchange_us"] * 1e-6
    on_cpu: bool = False

    def scaled(self, factor: float) -> Speed:
        """All rates multiplied; latencies divided, and what a CPU takes to issue if it is the one that computes."""
        return dataclasses.replace(
            self,
            operator=self.operator / (factor if self.on_cpu else 1),
            exchange=self.exchange / (factor if self.on_cpu else 1),
            efficiency={name: value * factor for name, value in self.efficiency.items()},
            host=self.host * factor,
            link_latency=self.link_latency / factor,
            network_latency=self.network_latency / factor,
        )


def read_speed(where: str, values: Mapping[str, Any], *, on_cpu: bool = False) -> Speed | None:
    """Of a GPU's table; None if it says nothing of speed. Raises ConfigError, in one line, for half of it."""
    given = [key for key in KEYS if key in values]
    if not given:
        return None
    missing = [key for key in KEYS if key not in values and key not in ISSUING]
    if missing:
        raise ConfigError(
            f"{where}: {given[0]} without {', '.join(missing)}; give all of them to plan time, or none of them"
        )
    number = {key: _number(where, key, {**ISSUING, **values}[key]) for key in (*NUMBERS, *ISSUING)}
    if number["spread"] >= 1:
        raise ConfigError(f"{where}: spread {number['spread']:g}: must be below 1, such as 0.15")
    flops = _table(where, "tflops", values["tflops"], DTYPES)
    efficiency = _table(where, "efficiency", values["efficiency"], EFFICIENCIES)
    for name, value in efficiency.items():
        if value > 1:
            raise ConfigError(f"{where}: efficiency {name} {value:g}: must be at most 1: the part that is reached")
    if number["gpus_per_node"] != int(number["gpus_per_node"]):
        raise ConfigError(f"{where}: gpus_per_node {number['gpus_per_node']:g}: must be a whole number")
    return Speed(
        flops={name: value * 1e12 for name, value in flops.items()},
        gpus_per_node=int(number["gpus_per_node"]),
        efficiency=efficiency,
        spread=number["spread"],
        on_cpu=on_cpu,
        **{name: number[f"{name}_gb_per_s"] * GB for name in ("memory", "link", "network", "host")},
        link_latency=number["link_us"] * 1e-6,
        network_latency=number["network_us"] * 1e-6,
        operator=number["operator_us"] * 1e-6,
        exchange=number["exchange_us"] * 1e-6,
    )


def _table(where: str, key: str, values: Any, names: tuple[str, ...]) -> dict[str, float]:
    if not isinstance(values, dict) or set(values) != set(names):
        strange = next((name for name in values if name not in names), None) if isinstance(values, dict) else None
        if strange is not None:
            raise ConfigError(f"{where}: {key}.{shown(strange)}: {unknown(shown(strange), names)}")
        raise ConfigError(f"{where}: {key}: must be a table of {', '.join(names)}")
    return {name: _number(where, f"{key}.{name}", values[name]) for name in names}


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise ConfigError(f"{where}: {key} {shown(str(value))}: must be a number above 0")
    return float(value)

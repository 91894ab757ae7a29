"""Settings that are worth a trial: the planner's search, and what trials teach it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2_tools.plan.calibration import LEAST, Trial, calibrate
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.plans import Plan, plan
from fsdp2_tools.plan.search import Setting, choices, lighter, search, varied
from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.steptime import step_time
from fsdp2_tools.tune.rounds import Candidate


class Planner:
    """Plans of settings on so many ranks, each executed once; their times follow the rates, which trials change."""

    def __init__(
        self,
        config: Config,
        ranks: int,
        gpu: Gpu | None,
        budget: int,
        on_gpu: bool,
        most: int,
        say: Callable[[str], None],
    ) -> None:
        """`most`: plans of a search."""
        self.config, self.ranks, self.gpu, self.budget = config, ranks, gpu, budget
        self._most, self._say = most, say
        self._plans: dict[str, Plan] = {}
        self._ways = choices(config, ranks, gpu=on_gpu)
        if self._plan(config, "default").fits:
            self._ways = lighter(config, self._ways)

    @property
    def speed(self) -> Speed | None:
        """Rates that plans are ranked by; None if nobody knows any."""
        return None if self.gpu is None else self.gpu.speed

    def _plan(self, changed: Config, flags: str) -> Plan:
        key = repr(changed)
        if key not in self._plans:
            self._say(f"planning {flags}")
            self._plans[key] = plan(changed, self.ranks, self.gpu, self.budget, keep=True)
        return self._plans[key]

    def _search(self, most: int) -> list[Setting]:
        return search(self.config, self._ways, self._plan, most=most)

    def first(self, count: int) -> list[Setting]:
        """The default, and so many others less one that fit. Raises ConfigError if nothing does.

        Where trials will teach the planner more, single changes teach most, and others aren't planned yet.
        """
        single = 1 + sum(len(ways) - 1 for ways in self._ways.values())
        found = self._search(self._most if self.speed is None else min(self._most, single))
        fitting = [one for one in found if one.changes and one.plan.fits]
        if not fitting and found[0].plan.fits:
            raise ConfigError("--plans: of those that were planned none is left but the default; raise it")
        if not fitting:
            raise ConfigError("--budget: no setting is planned to fit; python -m fsdp2.plan says what each takes")
        return [next(one for one in found if not one.changes), *varied(fitting, count - 1)]

    def largest(self, count: int) -> list[Plan]:
        """So many plans of those that fit, the largest models and optimizers first."""
        fitting = [one for one in self._plans.values() if one.fits]
        return sorted(fitting, key=lambda one: -one.memory.model_bytes - one.memory.optimizer_bytes)[:count]

    def further(self, tried: Sequence[Candidate], count: int) -> list[Setting]:
        """At most `count` further settings, the fastest first, by rates that trials have taught; none without rates."""
        if self.speed is None or not count:
            return []
        self._learn(tried)
        known = {one.name for one in tried}
        found = [one for one in self._search(self._most) if one.changes and one.plan.fits]
        return [one for one in found if one.name not in known][:count]

    def _learn(self, tried: Sequence[Candidate]) -> None:
        """Fit the rates to what was measured. Too few trials teach nothing."""
        assert self.gpu is not None
        trials = []
        for one in tried:
            runs, measured = self._plan(one.config, one.name).runs, one.milliseconds(tried[0])
            if measured is not None and runs is not None:
                trials.append(Trial(one.config, self.ranks, measured, runs))
        if len(trials) < LEAST:
            return
        found = calibrate(self.gpu, trials)
        self._say(found.told)
        self.gpu = found.gpu
        assert self.speed is not None
        for key, known in self._plans.items():
            assert known.runs is not None
            time = step_time(known.config, self.ranks, known.runs, self.speed)
            self._plans[key] = dataclasses.replace(known, time=time)

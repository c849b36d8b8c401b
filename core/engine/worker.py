"""One rank's executor: composes model, KV, drafter, sampling and the four verbs into the step that graphs capture.

* Keep `run_step` a straight line: no modes, no algorithm names, no host reads.
* Whatever differs between steps is a shape, a buffer or a number in the plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from core.devices.base import Device
from core.engine.feedback import InFlight, ResultRing, StepTensors
from core.engine.graphs import HostInputs, InputGeometry, StepProgram, host_inputs, padding_inputs
from core.engine.plan import Draws, Shaping, StepExtent, StepPlan, StepResult, StepShape
from core.engine.request_state import RequestState
from core.kvcache.storage import KVStorage
from core.models.base import TargetModel
from core.parallel import RankGroup
from core.sampling import sample
from core.shaping import ScoreTensors, ShapingRows, score
from core.spec.speculator import Arrangement, Speculator
from core.spec.verify import Verdict


class Worker:
    """Executes plans in order. Owns the device-side state of all sequences."""

    def __init__(
        self,
        *,
        model: TargetModel,
        speculator: Speculator,
        storage: KVStorage,
        state: RequestState,
        device: Device,
        group: RankGroup,
        lag: int,
        max_seqs: int,
        capture_on_demand: bool,
    ) -> None:
        self.model = model
        self.speculator = speculator
        self.storage = storage
        self.state = state
        self.device = device
        self.group = group
        self._target_caches = storage.layers[: len(model.kv_layers)]
        self._draft_caches = storage.layers[len(model.kv_layers) :]
        self._ring = ResultRing(lag=lag, max_seqs=max_seqs, draft_width=speculator.width, device=device)
        self._programs: dict[StepShape, StepProgram] = {}
        self._capture_on_demand = capture_on_demand
        self._geometry = InputGeometry(
            pad_row=state.pad_row, page_size=storage.page_size, vocab_size=model.vocab_size
        )

    def warm_up(
        self, shapes: Iterable[StepShape], extent: StepExtent, report: Callable[[StepShape], None]
    ) -> dict[StepShape, float]:
        """Capture every shape; run it on padding, which touches nothing but the dummy page.

        Operators are warm once a step of as many rows has run, so of the shapes with prompt rows, which differ in
        little else, one per row count runs, and of the kinds of draws the first. Returns the seconds of what ran.
        """
        seconds: dict[StepShape, float] = {}
        warm_rows: set[int] = set()
        for shape in shapes:
            num_rows = shape.target_rows + shape.chunk_rows
            is_base = shape.draws is Draws.GREEDY and shape.shaping is Shaping.NONE
            runs = is_base and not (shape.chunk_rows and num_rows in warm_rows)
            warm_rows.add(num_rows)
            started = time.perf_counter()
            self.device.run(partial(self._capture, shape, extent if runs else None))
            self.device.record().wait()
            if runs:
                seconds[shape] = time.perf_counter() - started
            report(shape)
        return seconds

    def _capture(self, shape: StepShape, extent: StepExtent | None) -> None:
        program = self._programs[shape] = StepProgram(shape, self._geometry, self.run_step, self.device)
        program.fill(padding_inputs(shape, self._geometry))
        if extent is not None:
            rows = min(self.speculator.width + 1, max(shape.target_rows, 1))
            program.graph.replay(dataclasses.replace(extent, rows_per_sequence=rows))

    def launch(self, plan: StepPlan) -> InFlight:
        """Order one step on the stream and return at once."""
        plan = self.group.share_plan(plan)
        host = host_inputs(plan, self._geometry)
        slot = self._ring.slot_of(plan.step)
        self.device.run(lambda: self._execute(plan, host, slot))
        return InFlight(plan=plan, slot=slot, event=self.device.record())

    def retire(self, launched: InFlight) -> StepResult:
        """Wait for a launched step and bring its results to the host."""
        return self._ring.retire(launched)

    def reset(self) -> None:
        """Forget every sequence on the device: calibration leaves nothing that a served request could see."""
        self.device.run(self.state.clear)
        self.device.record().wait()

    def _execute(self, plan: StepPlan, host: HostInputs, slot: int) -> None:
        self.state.admit(plan.admissions)
        self.state.append_pages(plan.page_updates)
        program = self._program(plan.shape)
        program.fill(host)
        program.graph.replay(plan.extent)
        if plan.shape.request_bucket or plan.shape.shaping is Shaping.PROMPT_SCORED:
            assert program.results is not None
            self._ring.copy_in(slot, program.results)

    def _program(self, shape: StepShape) -> StepProgram:
        program = self._programs.get(shape)
        if program is None:
            assert self._capture_on_demand, f"{shape} was not captured at startup"
            program = self._programs[shape] = StepProgram(shape, self._geometry, self.run_step, self.device)
        return program

    def run_step(self, program: StepProgram, extent: StepExtent) -> None:
        """The captured function: arrange, target, verify, agree, commit, publish, propose."""
        scores = None
        shape, inputs, spec, state = program.shape, program.inputs, self.speculator, self.state
        arranged = spec.arrange(state, inputs, shape, extent)
        output = self.model.forward(arranged.batch, self._target_caches, feature_layers=spec.feature_layers)
        if shape.request_bucket:
            verdict, scores = self._verify(program, arranged, output.hidden, extent)
            self._commit(program, arranged, verdict)
        else:
            verdict = spec.nothing_sampled(arranged)
        spec.publish(
            arranged,
            verdict,
            inputs,
            hidden=output.hidden,
            features=output.features,
            caches=self._draft_caches,
        )
        if shape.propose_depth:
            spec.propose(state, arranged, inputs, extent, self._draft_caches)
        elif shape.request_bucket:
            state.num_drafts.index_fill_(0, inputs.rows, 0)
        program.results = StepTensors(
            token_ids=verdict.token_ids,
            num_emitted=verdict.num_emitted,
            num_verified=arranged.lengths,
            confidence=state.confidence[inputs.rows],
            executed_rows=arranged.batch.decode.num_rows if arranged.batch.decode else 0,
            scores=scores,
            prompt_scores=self._prompt_scores(program, output.hidden),
        )

    def _verify(
        self, program: StepProgram, arranged: Arrangement, hidden: torch.Tensor, extent: StepExtent
    ) -> tuple[Verdict, ScoreTensors | None]:
        shape, inputs, spec = program.shape, program.inputs, self.speculator
        logits = self.model.logits(hidden[spec.logit_rows(inputs, shape)])
        sequence = arranged.sequence
        positions = arranged.batch.positions[: shape.target_rows]
        if shape.chunk_rows:
            sequence = torch.cat((sequence, torch.arange(inputs.rows.shape[0], device=sequence.device)))
            positions = torch.cat((positions, arranged.positions))
        shaped = logits
        if shape.shaping and self.state.shaping is not None:
            shaped = self.state.shaping.shape(
                logits,
                ShapingRows(
                    sequence=sequence,
                    positions=positions,
                    rows=inputs.rows,
                    anchors=arranged.positions,
                    drafts=arranged.drafts,
                ),
                inputs.allowed,
                penalties=extent.penalties,
                masks=extent.masks,
                num_positions=extent.context_pages * self.storage.page_size,
            )
        drawn = sample(
            shaped,
            self.state.sampling(inputs.rows[sequence]),
            positions + 1,
            any_sampled=shape.draws >= Draws.SAMPLED,
            any_filtered=shape.draws == Draws.FILTERED,
        )
        drawn = self.group.agree(drawn)
        scores = None
        if shape.shaping and extent.scores:
            scores = score(logits, drawn)[spec.emitted_rows(arranged, inputs, shape)]
        return spec.verify(drawn, arranged, inputs, shape), scores

    def _prompt_scores(self, program: StepProgram, hidden: torch.Tensor) -> ScoreTensors | None:
        """Log-probabilities of the tokens behind the prompt rows, for the chunks that asked and those that didn't."""
        if program.shape.shaping is not Shaping.PROMPT_SCORED:
            return None
        return score(self.model.logits(hidden[program.shape.target_rows :]), program.inputs.chunk_next_ids)

    def _commit(self, program: StepProgram, arranged: Arrangement, verdict: Verdict) -> None:
        """Move anchors over what was accepted; everything behind it is simply overwritten later."""
        rows, state = program.inputs.rows, self.state
        last = verdict.token_ids.gather(1, verdict.num_accepted[:, None])[:, 0]
        anchors = torch.where(arranged.active, last, state.anchor_ids[rows])
        state.anchor_ids.index_copy_(0, rows, anchors)
        state.positions.index_copy_(0, rows, arranged.positions + verdict.num_emitted)
        if program.shape.shaping and state.shaping is not None:
            state.shaping.append(rows, arranged.positions, verdict.token_ids)

"""Blockwise calibration: the sums of `calibrate`, with one block of the module in memory at a time.

    batches ──► forward, once: outputs of every unit ──► files
    loss ──► gradients at the outputs, by a run in which every unit is answered from its files
    units, last to first ──► each alone, on every batch: its sums; gradients at its inputs go to earlier outputs

A unit is repeated inside of a run of the complete module in which all earlier units are answered from files
(`units`), so skips, recurrence and shared inputs are right, whatever their topology. The sums of a matrix become
its sensitivity as soon as no earlier unit uses it, and go to a file too. Memory is that of one unit, of the activations
of one batch within it, and of what the module passes around it; the time is about one more forward pass.

    FOLDER/rank-0/                   (`stored`)
    ├── outputs/BATCH/               calls.json, and the outputs of each call
    └── steps/STEP/                  of one unit: gradients BATCH-CALL, sums and sensitivities of matrices

A file is removed when nothing needs it any more and all ranks have finished the step that says so. So a calibration
that was killed resumes after its last batch or step, with the same result.

    sensitivities ──► shrunk one at a time ──► units sorted, a group of tensors at a time ──► `CalibrationResult`

This folder keeps what was measured. All else is in a temporary folder inside, for as long as the result is in use:
shrunk sensitivities, sorted tensors, factors of error feedback, and the weights of the module that decoded weights are
tried in. Each rank shrinks the sensitivities of its own matrices, and all read them.
"""

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from birdie.compress.calibration.block_runs import BlockRuns
from birdie.compress.calibration.checks import checked_loss, naming_bad_weights, require_finite
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.identity import digest_of, digest_of_loss, digest_of_module
from birdie.compress.calibration.modes import evaluation_mode, measuring_mode
from birdie.compress.calibration.result import (
    CalibrationResult,
    checked_data,
    unreached,
)
from birdie.compress.calibration.scratch import Scratch
from birdie.compress.calibration.sensitivity import (
    Batch,
    Calibration,
    Loss,
    Recorder,
    Sums,
    all_exponents,
    all_shapes,
    names_by_memory,
    sensitivity_of,
)
from birdie.compress.calibration.shrinkage import shrink, with_row_floor
from birdie.compress.calibration.stored import (
    SUFFIX,
    StoredFactors,
    StoredSensitivities,
    WorkFolder,
    read_tensors,
    write_sensitivity,
)
from birdie.compress.calibration.symmetry import Symmetry, permute_sensitivity, sort_units, symmetries_of
from birdie.compress.calibration.units import (
    CALLS,
    Answer,
    Answers,
    Call,
    Capture,
    Interception,
    Units,
    find_units,
    not_repeated,
    read_answers,
)
from birdie.compress.scheme import Sensitivity
from birdie.compress.state import embeddings_of
from birdie.errors import ConfigError, DataError
from birdie.system.distributed import World, owners, together
from birdie.system.files import atomic_folder
from birdie.system.mapped import release
from birdie.system.outputs import Source
from birdie.system.tensor_files import write_tensors

_FORMAT = 1  # of the folder
_INDEX = "sorted.json"
_OUTPUTS, _STEPS = "outputs", "steps"
_FORWARD = 0.25  # share of the forward passes in the work, for the progress
_NO_UNITS = Units({}, frozenset())
_SUMS = ("inputs", "outputs", "looked_up", "draws")
_COUNTS = ("uses", "samples", "examples")


def calibrate_blockwise(
    module: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    folder: Path,
    *,
    blocks: Collection[str] | None = None,
    world: World | None = None,
    progress: Callable[[int], None] | None = None,
) -> StoredSensitivities:
    """Return what `calibrate` returns, up to rounding, in files and computed one block at a time.

    Args:
        module: neither trained nor changed. Its weights may be mapped: their pages are released after each unit.
        batches: arguments of `loss`; each is used once for every unit.
        loss: as in `calibrate`; it must do the same whenever it is called with a batch.
        folder: an empty or missing one, or one that this calibration left when it was stopped. Meanwhile it holds the
            outputs of all units: bytes of a batch's activations, times units, times batches.
        blocks: names of the modules to take as blocks; None: the members of `nn.ModuleList` and its like.
        world: ranks with different batches, which all see `folder`. Each sum goes to one rank alone.
        progress: called with the number of batches done; each unit is a part of the work on all of them.
    """
    world = world or World()
    names_by_memory(module)  # raises if there are none
    settings = {"format": _FORMAT, "blocks": None if blocks is None else sorted(blocks)}
    identity = {
        "another module": digest_of_module(module),
        "other batches": digest_of(list(batches)),
        "another loss": digest_of_loss(loss),
        "other settings": json.dumps(settings),
    }
    with WorkFolder.opened(folder, identity, world) as work, evaluation_mode(module):
        files = work.progress().get("sensitivities")
        if files is None:
            names = names_by_memory(module)
            device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
            runs = BlockRuns(module, batches, loss, device)
            recorder = Recorder(names, torch.Generator().manual_seed(0), device, gradients=True)
            units = together(world, lambda: find_units(module, recorder, runs.once, blocks) if batches else _NO_UNITS)
            files = _Calibration(work, runs, Interception(recorder, units), progress).finish()
            work.save_progress({"sensitivities": files})
        _keep(work.rank, {folder / file for file in files.values()})
    return StoredSensitivities({name: folder / file for name, file in files.items()})


def _keep(rank: Path, kept: Collection[Path]) -> None:
    """Remove the outputs of units, and all steps that left none of the files to keep."""
    folders = {path.parent for path in kept}
    shutil.rmtree(rank / _OUTPUTS, ignore_errors=True)
    for step in (rank / _STEPS).glob("*"):
        if step not in folders:
            shutil.rmtree(step, ignore_errors=True)


@dataclass(slots=True)
class _Calibration:
    """One calibration on one rank.

    Attributes:
        work: folder of the calibration.
        runs: of the module.
        calls: of units in the runs.
        progress: called with the number of batches done.
        answers: of each batch.
        steps: calls in the order in which they are repeated, last to first, after the loss, which is None.
        uses: matrices that each step uses on any rank; `last`: the last step that uses a matrix.
        gradients: (batch, index of a call in it) → file with the gradients at its outputs.
        sums: matrix → file with its sums so far.
    """

    work: WorkFolder
    runs: BlockRuns
    calls: Interception
    progress: Callable[[int], None] | None
    answers: list[dict[Call, Answer]] = field(default_factory=list)
    steps: list[Call | None] = field(default_factory=list)
    uses: list[set[str]] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Path] = field(default_factory=dict)
    sums: dict[str, Path] = field(default_factory=dict)
    _names: list[str] = field(init=False)
    _numbers: dict[str, int] = field(init=False)
    _owners: dict[str, int] = field(init=False)
    _reported: int = 0

    def __post_init__(self) -> None:
        self._names = sorted(self.calls.recorder.names.values())
        self._numbers = {name: number for number, name in enumerate(self._names)}
        sizes = {name: math.prod(shape) for (_, _, shape), name in self.calls.recorder.names.items()}
        self._owners = owners(self.work.world.size, sizes)

    def finish(self) -> dict[str, str]:
        """Do what is left and return name → file of the sensitivities, relative to the folder."""
        world = self.work.world
        together(world, self._capture)
        self._order()
        state = self.work.progress()
        if not sum(map(int, world.all_gather_strings(str(len(self.runs.batches))))):
            raise DataError("there are no calibration batches; give tens of thousands of tokens or images")
        for step in range(len(self.steps)):
            if step >= state.get("steps", 0):
                state = {"steps": step + 1, "units": self._take(step, state.get("units", 0.0))}
                self.work.save_progress(state)
            self._clean(step)
        files = {}
        for name, step in sorted(self.last.items()):
            file = self._step(self._owners[name], step) / self._file("sensitivity", name)
            if file.exists():  # else no gradient arrived at it
                files[name] = str(file.relative_to(self.work.root))
        if not files:
            raise ConfigError(
                "the calibration loss uses none of the module's matrices in a product that is seen block by block "
                "(F.linear, F.embedding, convolutions); check that it calls the module, or calibrate without blockwise"
            )
        return files

    def _capture(self) -> None:
        """Keep the outputs of all units on every batch that a stopped calibration has not done."""
        for index in range(len(self.runs.batches)):
            folder = self._outputs(index)
            if not (folder / CALLS).exists():
                with atomic_folder(folder, replace=True) as part, measuring_mode(self.runs.module):
                    capture = Capture(part, self.calls.used)
                    with self.runs.of(index) as run, self.calls.running(capture):
                        run()
                    capture.finish()
                self.calls.recorder.forget()
            self.answers.append(read_answers(folder))
            self._report(_FORWARD * (index + 1) / len(self.runs.batches))

    def _order(self) -> None:
        """Order the calls of all ranks, and find the last step that uses each matrix."""
        sequences: list[list[Call]] = []
        uses: dict[Call, set[str]] = {}
        tail: set[str] = set()
        for answers in self.answers:
            for call, answer in answers.items():
                (tail if answer.in_tail else uses.setdefault(call, set())).update(answer.matrices)
            sequence = [call for call, answer in answers.items() if not answer.in_tail]
            if sequence not in sequences:
                sequences.append(sequence)
        local = [sequences, [[call, sorted(names)] for call, names in uses.items()], sorted(tail)]
        sorter: TopologicalSorter[Call] = TopologicalSorter()
        for text in self.work.world.all_gather_strings(json.dumps(local)):
            sequences, pairs, names = json.loads(text)
            tail.update(names)
            for (name, number), names in pairs:
                uses.setdefault(Call(name, number), set()).update(names)
            for sequence in sequences:
                calls = [Call(*call) for call in sequence]
                sorter.add(calls[0]) if len(calls) == 1 else None
                for first, second in itertools.pairwise(calls):
                    sorter.add(second, first)
        try:
            order = list(sorter.static_order())
        except CycleError:
            raise ConfigError(
                "two batches call the blocks of the module in different orders; calibrate without blockwise"
            ) from None
        self.steps = [None, *reversed(order)]
        self.uses = [tail if call is None else uses[call] for call in self.steps]
        self.last = {name: step for step, names in enumerate(self.uses) for name in names}

    def _take(self, step: int, units: float) -> float:
        """Repeat one call on all batches, and leave what it found in a folder of its own.

        Args:
            step: index of the call.
            units: targets of all ranks, or batches where no targets are counted; the first step counts them.
        """
        world, recorder = self.work.world, self.calls.recorder
        with atomic_folder(self._step(world.rank, step), replace=True) as part:
            recorder.sums = {
                name: _read_sums(self.sums[name], self.runs.device) for name in self.uses[step] if name in self.sums
            }
            together(world, lambda: self._repeat_all(step, part))
            if self.steps[step] is None:
                counts = torch.tensor([recorder.targets, len(self.runs.batches)], dtype=torch.float64, device="cpu")
                targets, batches = world.sum_(counts.to(self.runs.device)).tolist()
                units = targets or batches
            finished = [name for name in sorted(self.uses[step]) if self.last[name] == step]
            local = {name: recorder.sums.pop(name, Sums()) for name in finished}
            for name, sums in recorder.sums.items():
                _write_sums(part / self._file("sums", name), sums)
            mine = self._reduced(local)
            taps = {name: math.prod(shape[2:]) for (_, _, shape), name in recorder.names.items()}

            def write() -> None:
                for name, sums in mine.items():
                    if sums.is_empty:
                        continue
                    sensitivity = sensitivity_of(sums, taps[name], units)
                    require_finite(name, sensitivity)
                    write_sensitivity(part / self._file("sensitivity", name), sensitivity)

            together(world, write)
        recorder.sums = {}
        return units

    def _reduced(self, local: dict[str, Sums]) -> dict[str, Sums]:
        """Return the sums over all ranks of the matrices that this rank owns, of which there are any."""
        world, mine = self.work.world, {}
        shapes = all_shapes({name: sums.shapes() for name, sums in local.items()}, world)
        exponents = all_exponents({name: sums.exponents for name, sums in local.items()}, world)
        for name in sorted(shapes):
            sums, owner = local.pop(name).filled(shapes[name], self.runs.device), self._owners[name]
            sums.rescale(exponents[name])
            for part in sums.tensors:
                if part is not None:
                    world.reduce_(part, owner)
            counts = torch.tensor([sums.uses, sums.samples, sums.examples], dtype=torch.float64, device="cpu")
            uses, samples, examples = world.reduce_(counts.to(self.runs.device), owner).tolist()
            if owner == world.rank and any(shape is not None for shape in shapes[name]):
                mine[name] = Sums(*sums.tensors, int(uses), samples, examples, sums.exponents)
        return mine

    def _repeat_all(self, step: int, part: Path) -> None:
        """Repeat a call on every batch; gradients at outputs of earlier calls go to files."""
        for index in range(len(self.runs.batches)):
            with naming_bad_weights(self.runs.module):
                gradients = self._repeat(index, self.steps[step])
            self.calls.recorder.forget()
            for target, tensors in gradients.items():
                if (index, target) in self.gradients:
                    for number, earlier in read_tensors(self.gradients[index, target])[0].items():
                        tensors[number] = tensors[number].cpu() + earlier if number in tensors else earlier
                write_tensors(part / f"gradients-{index}-{target}{SUFFIX}", tensors)
            done = step * len(self.runs.batches) + index + 1
            share = done / len(self.steps) / len(self.runs.batches)
            self._report(_FORWARD + (1 - _FORWARD) * share)

    def _repeat(self, index: int, call: Call | None) -> dict[int, dict[str, Tensor]]:
        """Repeat a call on a batch; return the gradients at outputs of earlier calls.

        Returns:
            index of the call in the batch → number of the output → gradient.
        """
        answers = self.answers[index]
        arrived: dict[str, Tensor] = {}
        if call is not None:
            if call not in answers or (index, answers[call].index) not in self.gradients:
                return {}  # the batch does not call it, or its loss does not depend on it
            arrived = read_tensors(self.gradients[index, answers[call].index])[0]
        stage = Answers(self._outputs(index), answers, self.calls.recorder, call)
        with self.runs.of(index) as run:
            with self.calls.running(stage):
                nats = run()
            return self._gradients(call, nats, stage, arrived)

    def _gradients(
        self, call: Call | None, nats: Any, stage: Answers, arrived: Mapping[str, Tensor]
    ) -> dict[int, dict[str, Tensor]]:
        """Return the gradients at outputs of earlier calls, as `_repeat`, of a run that is done."""
        recorder, answers = stage.recorder, stage.answers
        if call is None:
            ends: list[tuple[Tensor, Tensor | None]] = [(checked_loss(nats).reshape(()), None)]
        else:
            if not stage.outputs:
                raise not_repeated(call)
            ends = [(stage.outputs[int(number)], gradient) for number, gradient in arrived.items()]
            ends = [(end, gradient.to(end)) for end, gradient in ends if end.requires_grad and gradient is not None]
        starts: list[Tensor | GradientEdge] = [*recorder.roots, *stage.leaves.values()]
        if not ends or not starts:
            return {}
        with recorder.collecting():
            results = torch.autograd.grad(
                [end for end, _ in ends],
                starts,  # type: ignore[arg-type]  # it may mix tensors and edges
                [gradient for _, gradient in ends],
                allow_unused=True,
            )
        gradients: dict[int, dict[str, Tensor]] = {}
        for (target, number), gradient in zip(stage.leaves, results[len(recorder.roots) :], strict=True):
            if gradient is not None:
                gradients.setdefault(answers[target].index, {})[str(number)] = gradient
        return gradients

    def _clean(self, step: int) -> None:
        """Note the files of a finished step, and remove those that it replaces."""
        for file in sorted(self._step(self.work.world.rank, step).glob(f"*{SUFFIX}")):
            kind, *numbers = file.name.removesuffix(SUFFIX).split("-")
            if kind == "gradients":
                _replace(self.gradients, (int(numbers[0]), int(numbers[1])), file)
            elif kind == "sums":
                _replace(self.sums, self._names[int(numbers[0])], file)
        for name in self.uses[step]:
            if self.last[name] == step and name in self.sums:
                self.sums.pop(name).unlink(missing_ok=True)
        call = self.steps[step]
        for index, answers in enumerate(self.answers):
            if call is not None and call in answers:
                answer = answers[call]
                (self._outputs(index) / answer.file).unlink(missing_ok=True)
                if (index, answer.index) in self.gradients:
                    self.gradients.pop((index, answer.index)).unlink(missing_ok=True)

    def _report(self, share: float) -> None:
        """Report that a share of the work is done."""
        done = int(share * len(self.runs.batches) + 1e-9)
        if self.progress is not None and done > self._reported:
            self._reported = done
            self.progress(done)

    def _outputs(self, index: int) -> Path:
        return self.work.rank / _OUTPUTS / str(index)

    def _step(self, rank: int, step: int) -> Path:
        return self.work.root / f"rank-{rank}" / _STEPS / str(step)

    def _file(self, kind: str, name: str) -> str:
        return f"{kind}-{self._numbers[name]}{SUFFIX}"


def _replace(files: dict[Any, Path], key: Any, file: Path) -> None:
    """Note the newest file for a key, and remove the one before."""
    if key in files and files[key] != file:
        files[key].unlink(missing_ok=True)
    files[key] = file


def _write_sums(path: Path, sums: Sums) -> None:
    tensors = {key: part for key in _SUMS if (part := getattr(sums, key)) is not None}
    facts = {key: repr(getattr(sums, key)) for key in _COUNTS}
    write_tensors(path, tensors, facts | {"exponents": json.dumps(sums.exponents)})


def _read_sums(path: Path, device: torch.device) -> Sums:
    tensors, facts = read_tensors(path)
    inputs, outputs, looked_up, draws = (tensors[key].to(device) if key in tensors else None for key in _SUMS)
    counts = int(facts["uses"]), float(facts["samples"]), float(facts["examples"])
    return Sums(inputs, outputs, looked_up, draws, *counts, json.loads(facts.get("exponents", "{}")))


def calibrate_in_blocks(
    state: Mapping[str, Tensor],
    calibration: Calibration,
    *,
    folder: Source | None = None,
    blocks: Collection[str] | None = None,
    symmetries: bool = True,
    world: World | None = None,
    progress: Callable[[int], None] | None = None,
) -> CalibrationResult:
    """Return what `CalibrationResult.of` returns, up to rounding, with the memory of one block.

    Args:
        state: tensors to compress, under the names of the module's state dict.
        calibration: the module, batches, and loss: (module, batch) → any differentiable number, the same whenever it is
            called with a batch.
        folder: to work in; a calibration that was stopped resumes there, and one that is complete is not repeated.
            None: a temporary one, where the system has these.
        blocks: names of the modules to take as blocks; None: the members of `nn.ModuleList` and its like.
        symmetries: whether units may be permuted.
        world: ranks that share the batches out; all call this with the same arguments and see the folder.
        progress: called with the number of batches done.
    """
    world = world or World()
    module, loss, used, kept = checked_data(calibration, state)
    scratch = None if folder is not None else Scratch(Path(tempfile.gettempdir()), world)
    root = scratch.path / "calibration" if scratch is not None else Path(str(folder))

    def report(done: int) -> None:
        if progress is not None:
            progress(min(done * world.size, len(used)))

    mine = used[world.rank :: world.size]
    measured = calibrate_blockwise(module, mine, loss, root, blocks=blocks, world=world, progress=report)
    scratch = scratch or Scratch(root, world)
    numbers = {name: number for number, name in enumerate(measured)}
    sensitivities = _shrunk(measured, state, embeddings_of(module), numbers, scratch, world)
    groups = symmetries_of(module) if symmetries else ()
    together(world, lambda: _sort(state, groups, sensitivities, scratch) if world.is_main else None)
    tensors, files = _sorted(state, scratch)
    held_out = HeldOut(module, kept, loss, file=scratch.path / "decoded", world=world)
    factors = StoredFactors(scratch.path, numbers, scratch)
    missing = unreached(module, state, sensitivities)
    return CalibrationResult(tensors, sensitivities, held_out, used, factors, unreached=missing, files=files)


def _shrunk(
    measured: Mapping[str, Sensitivity],
    state: Mapping[str, Tensor],
    embeddings: Collection[str],
    numbers: Mapping[str, int],
    scratch: Scratch,
    world: World,
) -> StoredSensitivities:
    """Return the sensitivities as `birdie.compress.calibration.result` uses them, in new files."""
    files = {name: scratch.path / f"sensitivity-{number}{SUFFIX}" for name, number in numbers.items()}
    ranks = owners(world.size, {name: state[name].numel() if name in state else 0 for name in measured})
    mine = [name for name in measured if ranks[name] == world.rank]
    stored = StoredSensitivities(files, scratch)

    def write() -> None:
        for name, sensitivity in shrink(measured, state, mine, embeddings=embeddings):
            stored.store(name, with_row_floor(sensitivity))
            if name in state:
                release(state[name])

    together(world, write)
    return stored


def _sort(
    state: Mapping[str, Tensor], symmetries: Sequence[Symmetry], sensitivities: StoredSensitivities, scratch: Scratch
) -> None:
    """Sort the units of each group of tensors that symmetries join; write tensors and sensitivities that change."""
    files: dict[str, str] = {}
    for group in groups_of(symmetries):
        tensors, orders = sort_units(state, group, sensitivities)
        written: dict[int, str] = {}
        for name in sorted(name for name in tensors if tensors[name] is not state[name]):
            tensor = tensors[name]
            if id(tensor) not in written:
                written[id(tensor)] = f"tensor-{len(files)}{SUFFIX}"
                write_tensors(scratch.path / written[id(tensor)], {"": tensor})
            files[name] = written[id(tensor)]
            release(state[name])
            if name in sensitivities:
                sensitivities.store(name, permute_sensitivity(name, sensitivities[name], orders))
    (scratch.path / _INDEX).write_text(json.dumps(files), encoding="utf-8")


def groups_of(symmetries: Sequence[Symmetry]) -> list[list[Symmetry]]:
    """Return the symmetries in groups, each in their order, such that no two groups have a tensor in common."""
    groups: list[tuple[set[str], list[Symmetry]]] = []
    for symmetry in symmetries:
        names = {str(member[0]) for member in symmetry}
        joined = [group for group in groups if group[0] & names]
        merged = (names.union(*(group[0] for group in joined)), [one for group in joined for one in group[1]])
        merged[1].append(symmetry)
        groups = [*(group for group in groups if group not in joined), merged]
    return [group for _, group in groups]


def _sorted(state: Mapping[str, Tensor], scratch: Scratch) -> tuple[dict[str, Tensor], list[Path]]:
    """Return the state with the tensors that `_sort` wrote, mapped, and their files; tied names stay tied."""
    files = json.loads((scratch.path / _INDEX).read_text(encoding="utf-8"))
    paths = {file: scratch.path / file for file in sorted(set(files.values()))}
    tensors = {file: read_tensors(path)[0][""] for file, path in paths.items()}
    sorted_state = {name: tensors[files[name]] if name in files else tensor for name, tensor in state.items()}
    return sorted_state, list(paths.values())

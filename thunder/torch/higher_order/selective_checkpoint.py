"""Selective checkpointing: what a policy, which speaks of aten operators, has kept for the backward pass.

Eager PyTorch asks the policy about every aten operator that the function's calls are dispatched to. So it is asked
about what the operations of the function's trace would be dispatched to (``fake_run.py``), in the program's order.

An operator whose result is (a view of) the operation's result has the latter kept. One that lies within, as the first
product in an attention, has the result of that part of the operation kept which dispatches to the same operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachingTorchDispatchMode,
    noop_context_fn,
)

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import is_random, names
from thunder.torch.higher_order.fake_run import Call, FakeRun, storages
from thunder.torch.higher_order.redrawing import draw_from

Policy = Callable[..., Any]


@dataclasses.dataclass
class Kept:
    """What a policy has kept.

    Attributes:
        names: the results.
        results_only: those of them that are made by operations of which the policy does not keep everything.
        problems: what could not be found out or followed, in words.
    """

    names: set[str] = dataclasses.field(default_factory=set)
    results_only: set[str] = dataclasses.field(default_factory=set)
    problems: list[str] = dataclasses.field(default_factory=list)


def policy_of(context_fn: Callable, where: str) -> Policy | None:
    """The policy in what ``context_fn`` gives, if ``create_selective_checkpoint_contexts`` made it.

    Other context managers than those are ignored, with a warning.

    Args:
        context_fn: the plain function; it is called.
        where: how messages name the checkpointed function.
    """
    if context_fn is noop_context_fn:
        return None
    forward, recompute = context_fn()
    if isinstance(forward, _CachingTorchDispatchMode):
        return forward.policy_fn
    if not (type(forward) is type(recompute) is contextlib.nullcontext):
        warnings.warn(
            f"`torch.utils.checkpoint.checkpoint` of {where}: thunder.jit enters no context managers but those of "
            f"`create_selective_checkpoint_contexts`, and ignores the {type(forward).__name__} and the "
            f"{type(recompute).__name__} that `context_fn` gives.",
            stacklevel=2,
        )
    return None


def kept_by(policy: Policy, nested: NestedTrace, where: str) -> Kept:
    """What the policy has kept of a traced function; warns once of what it could not be asked about.

    Raises:
        Exception: what the policy raises.
    """
    survey = _Survey(policy, nested)
    for bsym in nested.computation_trace.bound_symbols:
        if bsym.sym.id not in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN):
            survey.ask_about(bsym)
    if survey.kept.problems:
        warnings.warn(
            f"`torch.utils.checkpoint.checkpoint` of {where}: the policy of selective checkpointing cannot be followed "
            f"everywhere, because {'; '.join(dict.fromkeys(survey.kept.problems))}. What it does not reach is computed "
            f"once more. Values and gradients are not affected.",
            stacklevel=2,
        )
    return survey.kept


_KNOWS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


def _answer(policy: Policy, call: Call) -> Any:
    given = {"op_output": call.result} if _KNOWS_OUTPUT else {}
    answer = policy(SelectiveCheckpointContext(is_recompute=False, **given), call.operator, *call.args, **call.kwargs)
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    return answer


def _is_kept(call: Call) -> bool:
    return call.answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _Survey:
    """Asks the policy about one bound symbol after the other, in the order of the trace."""

    def __init__(self, policy: Policy, nested: NestedTrace):
        self.kept = Kept()
        self._policy, self._run = policy, FakeRun(nested)

    def ask_about(self, bsym: BoundSymbol) -> None:
        try:
            calls = self._run(bsym)
        except Exception as error:
            self._ask_about_parts(bsym, error)
            return
        with self._run.fakes():
            for call in calls:
                call.answer = _answer(self._policy, call)
        self._keep(bsym, calls)

    def _ask_about_parts(self, bsym: BoundSymbol, error: Exception) -> None:
        for sub in bsym.subsymbols:
            self.ask_about(sub)
        self._run.make_up_results(bsym)
        decides = not bsym.subsymbols and not is_random(bsym) and bsym.sym is not draw_from
        if decides and any(isinstance(o, TensorProxy) for o in bsym.flat_outs):
            reason = str(error).partition("\n")[0]
            self.kept.problems.append(
                f"`{bsym.sym.name}` cannot be run on fake tensors ({type(error).__name__}: {reason})"
            )

    def _keep(self, bsym: BoundSymbol, calls: Sequence[Call]) -> None:
        given, results = self._run.storages(bsym.flat_proxy_args), self._run.storages(bsym.flat_proxy_outs)
        kept = [call for call in calls if _is_kept(call)]
        if any(storages(call.result) & results for call in kept):
            self.kept.names |= names(bsym.flat_proxy_outs)
            if any(not _is_kept(call) and not storages(call.result) <= given for call in calls):
                self.kept.results_only |= names(bsym.flat_proxy_outs)
        within = [c for c in kept if not storages(c.result) & results and not storages(c.result) <= given]
        if within:
            unclaimed = list(calls)
            self._keep_within(bsym.subsymbols, unclaimed)
            missed = {c.operator for c in within if c in unclaimed and c.answer is CheckpointPolicy.MUST_SAVE}
            for missing in sorted(map(str, missed)):
                self.kept.problems.append(f"thunder's `{bsym.sym.name}` has no part that is PyTorch's `{missing}`")

    def _keep_within(self, bsyms: Sequence[BoundSymbol], unclaimed: list[Call]) -> None:
        """Keeps the parts of an operation that dispatch to what the policy keeps of the whole."""
        for bsym in bsyms:
            try:
                calls = self._run(bsym)
            except Exception:
                self._keep_within(bsym.subsymbols, unclaimed)
                self._run.make_up_results(bsym)
                continue
            for call in calls:
                like = next((c for c in unclaimed if c.is_like(call)), None)
                if like is not None:
                    call.answer = like.answer
                    unclaimed.remove(like)
            self._keep(bsym, calls)

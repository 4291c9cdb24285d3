"""lightning-thunder's ``thunder.core.jit_ext``, re-entrant.

The installed source runs first; what follows differs from it. ``thunder_general_jit`` itself is the installed one:
the functions that it calls by name are replaced here by ones that ask the current level. See ``thunder/nested``.
"""

from thunder_overlay import execute_installed

execute_installed(globals())

import thunder.core.interpreter as interpreter
import thunder.nested.levels as levels
from thunder.common import CompileData  # noqa: F401  (code written for older releases imports it from here)
from thunder.core.compile_data import compile_data_and_stats  # noqa: F401  (likewise)
from thunder.core.interpreter import InterpreterError  # noqa: F401
from thunder.nested.attributes import forgets_computed, sees_what_was_set, sets_by_descriptor
from thunder.nested.captures import wrap_default_objects
from thunder.nested.effects import has_effects
from thunder.nested.errors import ResultError, UntraceableCallableError, name_of, user_location
from thunder.nested.generators import in_its_level
from thunder.nested.overrides import member_of
from thunder.nested.reads import has_key
from thunder.nested.results import finish, unpack_enclosing_values

_installed = {
    name: globals()[name]
    for name in (
        "JitCtx",
        "_general_jit_sharp_edge",
        "_general_jit_wrap_callback",
        "_general_jit_store_deref_callback",
        "_infer_name_postfix_from_provenance",
        "build_value_from_wrapped",
        "general_jit_lookaside",
        "get_parameter_or_buffer_or_submodule_name_and_root",
        "interpret",
        "process_recorded_modifications",
        "thunder_general_jit",
        "unpack_inputs",
    )
}


class JitCtx(_installed["JitCtx"]):
    """The context of a level, which knows the level."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compile_data = get_compile_data()
        self.level = levels.current_level()
        self.level.attach(self)
        self._known_constraints = set()

    def add_constraint(self, constraint):
        # the installed one compares with all constraints, which is quadratic in the size of the model
        try:
            key = tuple(map(variableify, constraint))
            if key not in self._known_constraints:
                self._known_constraints.add(key)
                self._constraints.append(constraint)
        except TypeError:  # unhashable
            super().add_constraint(constraint)

    # one line of progress over all levels, that of level 0

    def show_progress_if_verbose(self):
        if self.level.enclosing is None:
            super().show_progress_if_verbose()
        else:
            self.level.enclosing.ctx.show_progress_if_verbose()

    def end_progress(self):
        if self.level.enclosing is None:
            super().end_progress()

    def proxify(self, value):
        p = super().proxify(value)
        if isinstance(p, TensorProxy) and value.original_value is not value.nothing:
            self.level.python_types.setdefault(p.name, type(value.original_value))
        elif isinstance(p, dict):  # changes are made in a copy, of which methods are called for the next ones
            get_interpreterruntimectx().cache_wrapper(value)
        return p


def _general_jit_wrap_callback(value):
    level = get_jit_ctx().level
    level.adopt(value)
    result = _installed["_general_jit_wrap_callback"](value)
    if level.reads is not None:
        level.reads.note(value, level)
    return result


def _general_jit_sharp_edge(desc, value, /):
    location = user_location()
    where = "" if location is None else " It is at {}:{}.".format(*location)
    return _installed["_general_jit_sharp_edge"](desc + where, value)


def _note_second_path(value, provenance):
    level = levels.current_level()
    if level is not None and level.reads is not None:
        level.reads.note(value, level, provenance)


interpreter.second_path_callback = _note_second_path


def _before_function(fn):
    level = levels.current_level()
    if level is not None and level.enclosing is not None:
        wrap_default_objects(fn)


interpreter.before_function_callback = _before_function


def _generator_of_level(generator):
    level = levels.current_level()
    return generator if level is None else in_its_level(generator, level)


interpreter.generator_callback = _generator_of_level


def _general_jit_store_deref_callback(orig_value, name, co_cellsvars, co_freevars):
    level = get_jit_ctx().level
    if level.enclosing is not None and name in co_freevars:
        level.writes.before_store_deref(get_interpreterruntimectx().peek_frame_stack(), name)
    return _installed["_general_jit_store_deref_callback"](orig_value, name, co_cellsvars, co_freevars)


general_jit_callbacks |= {
    INTERPRETER_CALLBACKS.WRAP_CALLBACK: _general_jit_wrap_callback,
    INTERPRETER_CALLBACKS.STORE_DEREF_CALLBACK: _general_jit_store_deref_callback,
}


def _infer_name_postfix_from_provenance(pr):
    return get_jit_ctx().level.postfix(pr, _installed["_infer_name_postfix_from_provenance"](pr))


def get_parameter_or_buffer_or_submodule_name_and_root(provenance):
    return member_of(provenance, _installed["get_parameter_or_buffer_or_submodule_name_and_root"])


def interpret(fn, **options):
    return levels.current_level().observe(_installed["interpret"](fn, **options))


def interpreted_getitem(obj, key):
    """A subscript, to be interpreted: this module's frames are internal, so no proxy is named after ``obj``."""
    return obj[key]


def general_jit_lookaside(fn, /, *args, **kwargs):
    level = get_jit_ctx().level
    if level.enclosing is not None:
        if level.interprets(fn):
            return None
        level.before_call(fn, args)
    from thunder.nested.jitted import jitted_lookaside
    from thunder.nested.regions import module_region

    lookaside = jitted_lookaside(fn) or module_region(fn)
    if lookaside is not None:
        return lookaside
    lookaside = _installed["general_jit_lookaside"](fn, *args, **kwargs)
    if level.reads is not None:
        if fn is dict.__contains__:
            return has_key
        if lookaside is not None:
            level.reads.note_lookaside(fn, args)
        elif is_opaque(fn):
            level.reads.note_opaque_call(fn, (*args, *kwargs.values()))
    return lookaside


def leaves_no_scope(lookaside):
    """A lookaside that pushes a scope and, if the program's function raises, does not pop it: pops it then.

    What was recorded until then goes to the enclosing scope, because it may change tensors in place.
    """

    @wraps(lookaside)
    def restoring(*args, **kwargs):
        trace = get_jit_ctx().computation_trace
        depth = len(trace.scopes)
        try:
            return lookaside(*args, **kwargs)
        finally:
            while len(trace.scopes) > depth:
                left = trace.scopes.pop()
                trace.scopes[-1].extend(left)

    return restoring


for _fn in (
    torch.utils.checkpoint.checkpoint,
    torch.autograd.function.Function.apply.__func__,
    torch.ops.higher_order.autograd_function_apply,
):
    _general_jit_lookaside_map[_fn] = leaves_no_scope(_general_jit_lookaside_map[_fn])


@register_general_jit_lookaside(torch.is_grad_enabled)
def _is_grad_enabled():
    """The grad mode that the traced program has set. Stock thunder gives torch's, so leaving the inner one of two
    ``no_grad`` blocks, in a nested function say, ended the outer one, too."""
    return wrap_const(get_compile_data().is_grad_enabled)


_general_jit_lookaside_map[hasattr] = sees_what_was_set(_general_jit_lookaside_map[hasattr])
_general_jit_lookaside_map[object.__setattr__] = sets_by_descriptor(_general_jit_lookaside_map[object.__setattr__])
_general_jit_lookaside_map[setattr] = forgets_computed(_general_jit_lookaside_map[setattr])


def process_recorded_modifications(ctx, epilogue_trace):
    try:
        _installed["process_recorded_modifications"](ctx, epilogue_trace)
    except (NotImplementedError, AssertionError) as error:
        if not ctx.level.lenient:
            raise
        ctx.level.unrepresentable = error
        epilogue_trace.bound_symbols.clear()


def build_value_from_wrapped(wrapped_v):
    level = get_jit_ctx().level
    if level.result is not wrapped_v:
        return _installed["build_value_from_wrapped"](wrapped_v)
    try:
        return _installed["build_value_from_wrapped"](wrapped_v)
    except (NotImplementedError, TypeError) as error:  # TypeError: named tuples, and other types with arguments
        if not level.lenient:
            raise ResultError(
                f"{name_of(level.fn)} returns what a trace cannot represent ({error}). Return tensors, numbers, "
                f"strings, or tuples, lists, dicts and dataclasses of them."
            ) from error
        level.unrepresentable = error
        return tuple(p for p in tree_iter(unwrap(wrapped_v)) if isinstance(p, (TensorProxy, NumberProxy)))


def unpack_inputs(ctx, prologue_trace, pro_to_comp_inps, pro_to_epi_inps, args, kwargs):
    return unpack_enclosing_values(
        _installed["unpack_inputs"], ctx, prologue_trace, pro_to_comp_inps, pro_to_epi_inps, args, kwargs
    )


def thunder_general_jit(fn, args, kwargs, /, *, sharp_edges, ad_hoc_executor=None) -> TraceResults:
    """Traces ``fn(*args, **kwargs)``; re-entrant, at any depth.

    Called while another ``thunder_general_jit`` is running, it gives a ``TraceResults`` of its own and leaves the
    enclosing level as it was, on return and on every exception.

    Args:
        fn: the function or module.
        args, kwargs: its arguments; inside another run they may be, or hold, that run's proxies.
        sharp_edges: what to do about reads that cannot be guarded.
        ad_hoc_executor: where operators are registered that the function needs. Without one (the form of older
            releases) the enclosing level's is borrowed, and a function whose epilogue would only repackage gives
            its result itself from ``computation_trace``, with ``epilogue_trace`` None.

    Raises:
        UntraceableCallableError: ``fn`` is not callable.
        ResultError: ``fn`` returns what a trace cannot represent (inside another run).
    """
    results, _ = trace_level(fn, args, kwargs, sharp_edges=sharp_edges, ad_hoc_executor=ad_hoc_executor)
    return results


def trace_level(fn, args, kwargs, *, sharp_edges, ad_hoc_executor=None, lenient=False, prepare=None):
    """:func:`thunder_general_jit`, which also returns the level that it ran."""
    if not callable(fn):
        raise UntraceableCallableError(f"{fn!r} is not callable, so there is nothing to trace.")
    enclosing = levels.current_level()
    old_form = ad_hoc_executor is None
    if old_form:
        ad_hoc_executor = thunder.extend.TemporaryExecutor() if enclosing is None else enclosing.ctx.ad_hoc_executor
    with levels.enter_level(fn, (args, kwargs), lenient=lenient) as level:
        if prepare is not None:
            prepare(level)
        results = _installed["thunder_general_jit"](
            fn, args, kwargs, sharp_edges=sharp_edges, ad_hoc_executor=ad_hoc_executor
        )
        if enclosing is not None:
            results = finish(level, results, unpacked=old_form and not lenient and not has_effects(level))
    if enclosing is None and level.stats is not None:
        level.stats.nested_regions = level.regions.report
    return results, level

"""lightning-thunder's ``thunder.core.interpreter``, with faster globals, which tells of generators and of objects
reached by two paths, and knows the containers that it has copied.

The installed ``globals_lookup`` interprets ``lambda d, k: d[k]``, or ``getattr``, for every global and builtin that is
read, which is about half of the time that a model's tracing takes. Both end in what is called here directly. The
installed context asks ``inspect.stack()`` for its caller, which reads the source of the whole call stack, and at
every level: more than half of the time of tracing nested levels.
"""

from thunder_overlay import execute_installed, with_other_functions

execute_installed(globals())

_installed_globals_lookup = globals_lookup
_installed_setup = _setup_frame_and_run_python_function
_installed_make_generator = make_generator
_installed_wrap = wrap

# Called with a wrapper and the provenance of one more way to the same object. `wrap` gives the wrapper that it has made
# when the object was met first, and so forgets the other way; a region's read set needs both.
second_path_callback = None

# Called with a wrapped function before it is interpreted. Its defaults are constants to stock thunder.
before_function_callback = None

# Called with a generator that the interpreter has made of a frame; gives the one that the program gets.
generator_callback = None


def wrap(value, /, *, provenance):
    wrapped = _wrapper_of_changed_list(value) if type(value) is list else None
    if wrapped is None:
        wrapped = _installed_wrap(value, provenance=provenance)
    if second_path_callback is not None and isinstance(wrapped, WrappedValue) and wrapped is not value:
        if wrapped.provenance is not provenance:
            second_path_callback(wrapped, provenance)
    return wrapped


def _wrapper_of_changed_list(value):
    """The wrapper of a list that was changed in a copy. The installed `wrap` asserts that they are equally long."""
    known = get_interpreterruntimectx()._known_wrappers.get(id(value))
    wrapper = known[0]() if known is not None else None
    return wrapper if wrapper is not None and wrapper.original_value is value else None


def _setup_frame_and_run_python_function(compilectx, runtimectx, wrapped_fn, /, *args, **kwargs):
    if before_function_callback is not None and isinstance(wrapped_fn, WrappedValue):
        before_function_callback(wrapped_fn)
    return _installed_setup(compilectx, runtimectx, wrapped_fn, *args, **kwargs)


def _nearest_frames():
    """The frames that ``inspect.stack()`` would begin with, without their source."""
    return [inspect.getframeinfo(sys._getframe(depth), context=0) for depth in (1, 2, 3)]


inspect = with_other_functions(inspect, stack=_nearest_frames)


class InterpreterRuntimeCtx(InterpreterRuntimeCtx):
    """Knows the wrapper of a container's copy by the copy, too, which the methods bound to it lead to.

    Stock thunder takes it for another container: of two attributes set on an object from outside it records the first.
    """

    def register_proxied_value(self, v):
        super().register_proxied_value(v)
        if isinstance(v.value, (dict, list, set)):
            self.cache_wrapper(v)


def make_generator(frame, compilectx, runtimectx):
    made = _installed_make_generator(frame, compilectx, runtimectx)
    return made if generator_callback is None else wrap_const(generator_callback(unwrap(made)))


def globals_lookup(globals_dict, name):
    if isinstance(globals_dict, WrappedValue) and type(globals_dict.value) is dict:
        uname, names = unwrap(name), globals_dict.value
        if uname in names:
            return MutMappingWrapperMethods.__getitem__(globals_dict, wrap_const(uname))
        if "__builtins__" in names:
            builtins = MutMappingWrapperMethods.__getitem__(globals_dict, wrap_const("__builtins__"))
            if type(builtins.value) is dict and uname in builtins.value:
                return MutMappingWrapperMethods.__getitem__(builtins, wrap_const(uname))
            if isinstance(builtins.value, ModuleType) and hasattr(builtins.value, uname):
                return wrap_attribute(getattr(builtins.value, uname), builtins, wrap_const(uname))
    return _installed_globals_lookup(globals_dict, name)

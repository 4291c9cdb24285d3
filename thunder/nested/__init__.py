"""Nested tracing: the API for authors of higher-order lookasides.

A *higher-order* lookaside receives a function and needs its Thunder program. In three lines::

    @thunder.nested.lookaside(my_call)
    def _my_call(fn, *args, **kwargs):
        return thunder.nested.trace(fn, *args, **kwargs).inline()

See ``docs/higher_order_lookasides.md`` for worked examples.
"""

from thunder.nested.errors import ArgumentError as ArgumentError
from thunder.nested.errors import CaptureError as CaptureError
from thunder.nested.errors import EscapedProxyError as EscapedProxyError
from thunder.nested.errors import InPlaceError as InPlaceError
from thunder.nested.errors import LevelError as LevelError
from thunder.nested.errors import NestedTracingError as NestedTracingError
from thunder.nested.errors import OutsideTraceError as OutsideTraceError
from thunder.nested.errors import ReplayError as ReplayError
from thunder.nested.errors import ResultError as ResultError
from thunder.nested.errors import UntraceableCallableError as UntraceableCallableError
from thunder.nested.lookasides import lookaside as lookaside
from thunder.nested.regions import RegionReport as RegionReport
from thunder.nested.regions import report as report
from thunder.nested.trace import Input as Input
from thunder.nested.trace import NestedTrace as NestedTrace
from thunder.nested.trace import trace as trace

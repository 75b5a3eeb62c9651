"""SIGTERM and SIGINT end a run after the step at hand, instead of in its middle."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """`with Interrupt() as stop:` notes the first signal in `stop.caught`; a second one acts as it would without us."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.caught: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        # Python delivers signals to the main thread only; elsewhere whoever owns it decides.
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

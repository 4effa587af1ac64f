"""Words that all sides share; standard library only; a thing is admitted only if two rooms need it."""

__version__ = "0.2.0"

"""Being told to stop: a flag and a time, notices to poll for, and whether a save still fits. No torch."""

from samerun.preempt.budget import Preemption
from samerun.preempt.sources import AwsSpotNotice, FileNotice, Notice, NoticeSource

__all__ = ["AwsSpotNotice", "FileNotice", "Notice", "NoticeSource", "Preemption"]

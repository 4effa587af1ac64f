"""Whether all ranks come to the same collectives: histories of the imagined ranks are compared, and arms of branches."""

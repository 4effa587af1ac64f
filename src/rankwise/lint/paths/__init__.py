"""Whether all ranks come to the same collectives: histories of the virtual ranks are compared, and arms of branches."""

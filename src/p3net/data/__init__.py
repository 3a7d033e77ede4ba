"""Images with points: every layout people hold, read, checked, split and fed."""

"""What happened, as frozen events; metrics and log lines are listeners."""

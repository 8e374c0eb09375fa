"""What a plan means: layouts, messages, schedules and tied parameters, in pure Python."""

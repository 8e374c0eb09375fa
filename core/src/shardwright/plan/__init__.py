"""The meaning of a plan: axes, layouts, messages, schedules and tied parameters, in pure Python."""

"""The cost of a plan: one pure function per term of time and memory."""

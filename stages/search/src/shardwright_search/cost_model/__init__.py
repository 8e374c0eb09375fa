"""What a plan costs: one pure function per term of time and memory."""

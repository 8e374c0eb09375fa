"""Why a plan: its terms by pipeline stage, what binds, what differs, and what would help."""

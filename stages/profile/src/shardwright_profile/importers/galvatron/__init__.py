"""Profiles of hetu-galvatron."""

"""Importers of profiles of hetu-galvatron."""

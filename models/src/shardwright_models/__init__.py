"""What each family of Transformers is, without torch: everything else that must know reads it here."""

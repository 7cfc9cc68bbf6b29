"""Model runner V2: verification, drafts and what is put where V2 reads it. The only part that knows this runner."""

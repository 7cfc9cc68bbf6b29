"""Model runner V1: sampler, drafts and the rows of a step. The only part that knows this runner of vLLM's."""

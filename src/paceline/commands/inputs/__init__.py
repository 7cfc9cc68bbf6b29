"""What several commands are given, checked before anything starts: options, model folder, prompts, sampling."""

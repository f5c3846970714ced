"""A GPT under a byte budget: data, model, training, scoring, runs."""

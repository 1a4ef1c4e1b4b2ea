"""Makes the checkpoint that ships: data, model, training loops, export, evaluation, model card."""

"""The makers of the checkpoint that ships: data, model, training loops, export, evaluation, model card."""

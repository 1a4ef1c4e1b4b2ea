"""Parts of tools/train_default_model.py: data, model, training loops, export, evaluation, model card."""

"""The target model, its MTP head, and the loader that fills them."""

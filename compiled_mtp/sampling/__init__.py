"""What decides a request's tokens beside the model: parameters, logprobs, grammars."""

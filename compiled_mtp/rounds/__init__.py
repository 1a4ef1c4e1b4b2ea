"""What stands beside a decode round: its packed output, the log probabilities of prompts."""

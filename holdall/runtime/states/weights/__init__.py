"""Working weights of placed parameters: streamed, cached, found by their readers."""

"""The one error of devservices: a service could not be had, with the reason and what to do about it."""


class ServicesError(RuntimeError):
    """A development service is missing, didn't start, or can't do what was asked; the message names the remedy."""

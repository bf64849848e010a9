"""What the stub's model says, over and over; each word is one token of the default model."""

WORDS = (" time", " day", " year", " way", " man", " thing", " world")

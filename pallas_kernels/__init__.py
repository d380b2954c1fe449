"""Operations: a folder each, with an oracle and one file a backend."""

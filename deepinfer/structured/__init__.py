"""Answers that must look like something: grammars, compiled and followed token by token."""

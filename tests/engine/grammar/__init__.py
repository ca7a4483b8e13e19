"""Tests of engine/grammar."""

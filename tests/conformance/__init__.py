"""Does the library keep its contract? Everything here is compared with tests/oracle.py or a law."""

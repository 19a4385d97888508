"""Where Hive remembers: live state in Redis (may be lost), truth and history in SQLite (may not)."""

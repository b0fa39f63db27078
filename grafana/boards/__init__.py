"""The four dashboards, each answering one question."""

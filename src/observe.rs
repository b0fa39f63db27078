//! Metrics, status and the admin interface.

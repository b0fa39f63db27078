//! Metrics of the build and the configuration.

use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGauge};

use super::Maker;
use crate::make;
use foretell_metrics as metric;
use foretell_net::clock::unix_now;

#[derive(Debug)]
pub(super) struct ConfigMetrics {
    info: GaugeVec,
    synchronized: IntGauge,
    success: Gauge,
    reloads: IntCounterVec,
}

impl ConfigMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let build = new.register(make::gauges(metric::BUILD))?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        let config = Self {
            info: new.register(make::gauges(metric::CONFIG))?,
            synchronized: new.register(make::int_gauge(metric::SYNCHRONIZED))?,
            success: new.register(make::gauge(metric::CONFIG_SUCCESS))?,
            reloads: new.register(make::counters(metric::RELOADS))?,
        };
        config.synchronized.set(1);
        for result in ["success", "failure"] {
            config.reloads.with_label_values(&[result]);
        }
        Ok(config)
    }

    pub(super) fn loaded(&self, version: &str, taken: bool, synchronized: bool) {
        self.info.reset();
        self.info.with_label_values(&[version]).set(1.0);
        self.synchronized.set(i64::from(synchronized));
        self.reloads.with_label_values(&[if taken { "success" } else { "failure" }]).inc();
        if taken {
            self.success.set(unix_now().as_secs_f64());
        }
    }
}

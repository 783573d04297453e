"""The latency model: batch features, fitting, prediction and the budget that an SLO leaves."""

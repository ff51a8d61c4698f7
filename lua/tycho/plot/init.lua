--- Plots to SVG and PNG: require "tycho".plot.
return require "tycho.lazy" ({
  line = require "tycho.plot.line",
  grid = require "tycho.plot.grid",
}, { batch = "tycho.plot.batch" }, "ty.plot")

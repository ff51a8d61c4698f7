--- Plots to SVG and PNG: require "tycho".plot.
return {
  line = require "tycho.plot.line",
  grid = require "tycho.plot.grid",
}

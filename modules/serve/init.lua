--- Serving models: require "tycho.serve".
return require "tycho.lazy" ({}, {
  http = { "tycho.serve.http", "new" },
}, "tycho.serve")

--- Serving language models: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local engine = serve.engine(model, { requests = 32 })
--     local request = engine:submit(tokens, { count = 100 })
--     engine:run()                    -- request.tokens
--     serve.adapters(engine):add("french", "adapters/french")     -- submit(tokens, { adapter = "french" })
return require "tycho.lazy" ({}, {
  engine = { "tycho.serve.engine", "new" },
  adapters = { "tycho.serve.adapters", "new" },
  traces = "tycho.serve.traces",
  adapter_trials = "tycho.serve.adapter_trials",
}, "tycho.serve")

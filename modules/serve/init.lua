--- Serving language models: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local engine = serve.engine(model, { requests = 32 })
--     local request = engine:submit(tokens, { count = 100 })
--     engine:run()                    -- request.tokens
return require "tycho.lazy" ({}, {
  engine = { "tycho.serve.engine", "new" }, replay = "tycho.serve.replay",
}, "tycho.serve")

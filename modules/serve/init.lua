--- Serving language models: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local engine = serve.engine(model, { tokenizer = tokenizer })
--     local request = engine:submit(tokens, { count = 100 })
--     engine:run()                    -- request.tokens; or serve.http(engine):run()
return require "tycho.lazy" ({}, {
  engine = { "tycho.serve.engine", "new" },
  http = { "tycho.serve.http", "new" },
  replay = "tycho.serve.replay",
}, "tycho.serve")

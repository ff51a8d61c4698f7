--- Serving language models: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local engine = serve.engine(model, { tokenizer = tokenizer })
--     local request = engine:submit(tokens, { count = 100 })
--     engine:run()                    -- request.tokens; or serve.http(engine):run()
--
-- engine: many requests at once to one model; http: behind the API of OpenAI; replay: traces of requests by a clock
-- that counts computing. melange: which GPUs serve requests of many sizes as cheaply as can be, by packing: pieces
-- into machines of several kinds.
return require "tycho.lazy" ({}, {
  engine = { "tycho.serve.engine", "new" },
  http = { "tycho.serve.http", "new" },
  melange = "tycho.serve.melange",
  packing = "tycho.serve.packing",
  replay = "tycho.serve.replay",
}, "tycho.serve")

-- The server of HTTP: bodies, answers that come later and in pieces, clients that leave, that are slow, or that send
-- what is no request. The clients are processes; the server runs in this test.
local here = (arg and arg[0]:match ".*/") or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local clients = dofile(here .. "http_client.lua")
local http, request = ty.core.http_core, clients.request

do
  local fine, problem = pcall(http.listen, "127.0.0.1", 0)
  if fine then problem:close() end
  if not fine or not clients.works then
    print("skipped: " .. (fine and "there is no bash to ask a server" or tostring(problem)))
    check.finish()
    return
  end
end

local plain = { ["Content-Type"] = "text/plain" }

-- A server with a handler, and a function that answers what comes until clients are over.
local function serve(handler, options)
  local server, port = http.listen("127.0.0.1", 0, options)
  return server, port, function(...)
    return clients.drive(function() server:poll(handler, 10) end, ...)
  end
end

check.test("what is asked: method, path, query, host, headers, body", function()
  local seen
  local _ <close>, port, drive = serve(function(...)
    seen = table.pack(...)
    return 200, plain, "answer"
  end)
  local one = clients.start(port, request("POST", "/a%20b?x=1&y=", "the body\0\255", "X-Some-Header: Of mine\r\n"))
  check.ok(drive(one))
  check.equal({ seen[1], seen[2], seen[3], seen[4], seen[6], seen[7] },
    { "POST", "/a b", { x = "1", y = "" }, "localhost", "the body\0\255", nil })
  check.equal(seen[5]["x-some-header"], "Of mine")
  local status, head, body = one:reply()
  check.equal({ status, body }, { 200, "answer" })
  check.ok(head:find("Content-Type: text/plain", 1, true), head)
  local chunked = clients.start(port, { "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    .. "Connection: close\r\n\r\n3\r\nabc\r\n", 0.05, "2\r\nde\r\n0\r\n\r\n" })
  local none = clients.start(port, request("GET", "/"))
  check.ok(drive(chunked, none))
  check.equal({ (chunked:reply()), (none:reply()) }, { 200, 200 })
end)

check.test("bodies that are too large, or too many at once", function()
  local got = {}
  local function handler(_, path, _, _, _, body, problem)
    got[path] = body and #body or problem
    return body and 200 or problem == "too large" and 413 or 503, {}, ""
  end
  local _ <close>, port, drive = serve(handler, { body = 1 << 16 })
  local one = clients.start(port, request("POST", "/fits", ("x"):rep(1 << 16)))
  local two = clients.start(port, request("POST", "/more", ("x"):rep((1 << 16) + 1)))
  local large = clients.start(port, request("POST", "/much", ("x"):rep(1 << 20)))
  check.ok(drive(one, two, large))
  check.equal({ (one:reply()), (two:reply()), (large:reply()) }, { 200, 413, 413 })
  check.equal(got, { ["/fits"] = 1 << 16, ["/more"] = "too large", ["/much"] = "too large" })
  local huge = clients.start(port, request("POST", "/huge", ("x"):rep(4 << 20))) -- nobody reads that
  check.ok(drive(huge))
  check.equal({ huge:reply(), got["/huge"] }, { nil, nil })
  -- Twelve who each send most of what they may, and stop.
  local half = {}
  for i = 1, 12 do
    half[i] = clients.start(port, { ("POST /%d HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"):format(i)
      .. "Content-Length: 60000\r\n\r\n" .. ("x"):rep(59999), 1, "x" })
  end
  check.ok(drive(table.unpack(half)))
  local count = { [200] = 0, [503] = 0 }
  for i = 1, 12 do
    local status = half[i]:reply()
    count[status] = (count[status] or 0) + 1
  end
  check.equal(count, { [200] = 8, [503] = 4 }, "eight times the size of one")
  local again = clients.start(port, request("POST", "/again", ("x"):rep(1 << 16)))
  check.ok(drive(again))
  check.equal((again:reply()), 200, "and there is room again")
end)

check.test("an answer that comes later", function()
  local answers = {}
  local server
  local function handler(_, path)
    local answer = server:answer()
    answers[path] = answer
    if path == "/now" then check.equal(answer:finish(201, plain, "at once"), true) end
    return answer
  end
  local opened <close>, port, drive = serve(handler)
  server = opened
  check.fails(function() server:answer() end, "answer: expected a handler that was called")
  local one = clients.start(port, request("GET", "/now"))
  check.ok(drive(one))
  check.equal({ (one:reply()), (select(3, one:reply())) }, { 201, "at once" })
  local two, three = clients.start(port, request("POST", "/two", "body")), clients.start(port, request("GET", "/three"))
  check.ok(drive(function() return answers["/two"] and answers["/three"] end))
  for _ = 1, 5 do server:poll(handler, 5) end
  check.equal({ two:got(), three:got(), answers["/two"].gone }, { "", "", false })
  check.equal(answers["/three"]:finish(200, plain, "third"), true)
  check.fails(function() answers["/three"]:finish(200, plain, "") end, "finish: the answer was given already")
  check.fails(function() answers["/three"]:write "x" end, "expected an answer that streams, got one that was given")
  check.fails(function() answers["/two"]:write "x" end, "write: expected an answer that streams, got one that did not")
  check.fails(function() answers["/two"]:finish(99, plain, "") end, "a status from 200 to 599")
  check.fails(function() answers["/two"]:finish(200, { ["A\r\nB"] = "x" }, "") end, "cannot be one")
  check.fails(function() answers["/two"]:finish(200, { A = "x\r\ny" }, "") end, "'A' or its value cannot be one")
  check.fails(function() answers["/two"]:finish(200, plain) end, "finish")
  check.equal(answers["/two"]:finish(404, {}, "second"), true)
  check.ok(drive(two, three))
  check.equal({ (two:reply()), (select(3, two:reply())), (select(3, three:reply())) }, { 404, "second", "third" })
  check.equal({ answers["/two"].gone, answers["/two"].waiting }, { false, 0 })
  answers = {}
  local kept = clients.start(port, { "GET /first HTTP/1.1\r\nHost: localhost\r\n\r\nGET /second HTTP/1.1\r\n"
    .. "Host: localhost\r\nConnection: close\r\n\r\n" })
  check.ok(drive(function() return answers["/first"] end))
  check.equal(answers["/second"], nil)
  answers["/first"]:finish(200, {}, "one")
  check.ok(drive(function() return answers["/second"] end))
  answers["/second"]:finish(200, {}, "two")
  check.ok(drive(kept))
  check.ok(kept:got():find "one.*two", "two requests on one connection")
end)

check.test("an answer in pieces", function()
  local answers = {}
  local server
  local function handler(method, path)
    local answer = server:answer()
    answers[method .. path] = answer
    if path == "/short" then
      answer:stream(200, plain)
      answer:write "all of it"
      answer:close()
    end
    return answer
  end
  local opened <close>, port, drive = serve(handler)
  server = opened
  local one = clients.start(port, request("GET", "/long"))
  check.ok(drive(function() return answers["GET/long"] end))
  local long = answers["GET/long"]
  check.equal(long:stream(200, { ["Content-Type"] = "text/event-stream" }), true)
  check.equal(long:write "data: 1\n\n", 9)
  check.ok(drive(function() return one:got():find "data: 1" end), "each piece goes out as it comes")
  check.ok(one:got():lower():find "transfer%-encoding: chunked", one:got())
  check.equal(long.waiting, 0)
  check.equal(long:write "", 0)
  check.equal(long:write "data: 2\n\n", 9)
  check.equal(long:write(("x"):rep(100000)), 100009)
  check.fails(function() long:stream(200, {}) end, "stream: the answer was given already")
  check.fails(function() long:finish(200, {}, "") end, "finish: the answer was given already")
  check.equal(long:close(), true)
  check.fails(function() long:write "x" end, "given already")
  check.ok(drive(one))
  local _, _, body, complete = one:reply()
  check.equal({ body, complete }, { "data: 1\n\ndata: 2\n\n" .. ("x"):rep(100000), true })
  local two, three = clients.start(port, request("GET", "/short")), clients.start(port, request("HEAD", "/head"))
  local old = clients.start(port, "GET /short HTTP/1.0\r\n\r\n")
  check.ok(drive(two, old))
  check.equal(select(3, two:reply()), "all of it")
  check.ok(old:got():find "\r\n\r\nall of it$", "of HTTP/1.0")
  check.ok(drive(function() return answers["HEAD/head"] end))
  answers["HEAD/head"]:stream(200, plain)
  check.ok(drive(three))
  check.equal(select(3, three:reply()), "")
  check.equal({ answers["HEAD/head"].gone, answers["HEAD/head"]:write "x" }, { true }, "who asked for the head alone")
end)

check.test("clients that leave", function()
  local answers = {}
  local server
  local function handler(_, path)
    answers[path] = server:answer()
    if path == "/stream" then answers[path]:stream(200, plain) end
    return answers[path]
  end
  local opened <close>, port, drive = serve(handler)
  server = opened
  clients.start(port, request("GET", "/wait"), { leave = 0.3 })
  clients.start(port, request("GET", "/stream"), { leave = 0.3 })
  check.ok(drive(function() return answers["/wait"] and answers["/stream"] end))
  check.equal({ answers["/wait"].gone, answers["/stream"].gone }, { false, false })
  check.equal(answers["/stream"]:write "one", 3)
  check.ok(drive(function() return answers["/wait"].gone and answers["/stream"].gone end), "who has left is gone")
  check.equal(answers["/wait"]:finish(200, plain, "too late"), false)
  check.equal({ answers["/stream"]:write "two", answers["/stream"]:close() }, { nil, false })
  -- While it sends: the rest of the request never comes.
  clients.start(port, "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf", { leave = 0.1 })
  clients.start(port, "POST / HT", { leave = 0.1 })
  local last = clients.start(port, request("GET", "/last"), { leave = 0.6 })
  check.ok(drive(function() return last:over() end))
  check.equal(answers["/"], nil)
  -- An answer that nobody holds any more lets its client go.
  answers = {}
  local lost = clients.start(port, request("GET", "/lost"))
  check.ok(drive(function() return answers["/lost"] end))
  answers = {}
  collectgarbage()
  collectgarbage()
  check.ok(drive(lost))
  check.equal(lost:reply(), nil)
  local broken = clients.start(port, request("GET", "/stream"))
  check.ok(drive(function() return answers["/stream"] end))
  answers["/stream"]:write "some"
  check.ok(drive(function() return broken:got():find "some" end))
  answers["/stream"]:drop()
  check.ok(drive(broken))
  check.equal({ select(3, broken:reply()) }, { "some", false }, "without its end")
end)

check.test("a client that does not read: what waits for it is bounded", function()
  local answer
  local server
  local function handler()
    answer = server:answer()
    answer:stream(200, plain)
    return answer
  end
  local opened <close>, port, drive = serve(handler, { waiting = 1 << 18 })
  server = opened
  clients.start(port, request("GET", "/"), { deaf = 5 })
  check.ok(drive(function() return answer end))
  local written, most = 0, 0
  check.ok(clients.drive(function()
    local waiting = answer:write(("x"):rep(1 << 16))
    if waiting then written, most = written + (1 << 16), math.max(most, waiting) end
    server:poll(handler, 0)
  end, function() return answer.gone end))
  check.ok(most <= 1 << 18 and written >= 1 << 18 and written < 64 << 20, written)
  check.equal(answer:write "more", nil)
end)

check.test("many connections, most of which say nothing", function()
  local _ <close>, port, drive = serve(function() return 200, {}, "here" end, { connections = 8 })
  for i = 1, 16 do clients.start(port, i % 2 == 0 and "GET / HT" or { 0.01 }, { leave = 1 }) end
  local one = clients.start(port, { 0.1, request("GET", "/") })
  check.ok(drive(one))
  check.equal((one:reply()), 200, "it waits until there is room")
end)

check.test("clients that left while the server did something else", function()
  local _ <close>, port, drive = serve(function() return 200, {}, "here" end, { connections = 1 })
  for _, bytes in ipairs { "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf", "GET / HT",
    request("GET", "/"):gsub("Connection: close\r\n", "") } do
    local left = clients.start(port, bytes, { leave = 0.05 })
    check.ok(clients.drive(function() ty.system.sleep(0.02) end, left)) -- its end comes together with its bytes
    local began, one = ty.system.clock(), clients.start(port, request("GET", "/"))
    check.ok(drive(one))
    check.equal((one:reply()), 200)
    check.ok(ty.system.clock() - began < 20, "the place of who has left is free")
  end
end)

check.test("clients that are slow", function()
  local handler_calls = 0
  local _ <close>, port, drive = serve(function()
    handler_calls = handler_calls + 1
    return 200, {}, ("x"):rep(1 << 25)
  end, { patience = 1 })
  local drops = { "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n" }
  for i = 1, 30 do drops[2 * i], drops[2 * i + 1] = 0.2, "x" end
  local clock = ty.system.clock
  local began = clock()
  local slow, silent = clients.start(port, drops), clients.start(port, "GET / HT")
  check.ok(drive(silent))
  check.ok(clock() - began < 10, "who says half of what it wants")
  check.ok(drive(slow))
  check.equal({ slow:reply(), silent:reply(), handler_calls }, { nil, nil, 0 })
  local quick = clients.start(port, request("GET", "/"))
  check.ok(drive(quick))
  check.equal({ (quick:reply()), #select(3, quick:reply()) }, { 200, 1 << 25 })
end)

check.test("what is no request", function()
  local asked = 0
  local _ <close>, port, drive = serve(function()
    asked = asked + 1
    return 200, {}, "yes"
  end)
  local list = {}
  for i, bytes in ipairs { "\0\1\2\3 nonsense\r\n\r\n", "GET " .. ("/"):rep(100000) .. " HTTP/1.1\r\nHost: a\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\n" .. ("X: " .. ("y"):rep(1000) .. "\r\n"):rep(200) .. "\r\n", "\r\n\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nx\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", ("\r\n"):rep(20000) } do
    list[i] = clients.start(port, bytes, { leave = 1 })
  end
  check.ok(drive(table.unpack(list)))
  for i, client in ipairs(list) do check.ok(client:reply() ~= 200, i) end
  check.equal(asked, 0)
  local state = 7
  local text = request("POST", "/some/path?with=query", "body", "Accept: */*\r\nX: y\r\n")
  for i = 1, 20 do -- bytes of a request changed
    local bytes = text
    for _ = 1, 3 do
      state = (state * 6364136223846793005 + 1442695040888963407)
      local at = (state >> 33) % #text
      bytes = bytes:sub(1, at) .. string.char(state >> 20 & 255) .. bytes:sub(at + 2)
    end
    list[i] = clients.start(port, bytes, { leave = 0.2 })
  end
  check.ok(drive(table.unpack(list)))
  local fine = clients.start(port, request("GET", "/"))
  check.ok(drive(fine))
  check.equal((fine:reply()), 200, "and it still answers")
end)

check.test("handlers that fail", function()
  local server <close>, port = serve(function() end)
  local answer
  local handlers = {
    [function() error "no way" end] = "no way",
    [function() end] = "argument 1: expected an integer, got nil",
    [function() return 200, {} end] = "expected a string, got nil",
    [function() return 200, {}, {} end] = "expected a string, got a table",
    [function() return 1000, {}, "" end] = "a status from 200 to 599",
    [function() return 200, { [1] = "x" }, "" end] = "cannot be one",
    [function()
      answer = server:answer()
      return 200, {}, ""
    end] = "has to return the answer that it made",
    [function()
      local own = server:answer()
      own:finish(200, {}, "")
      return 200, {}, ""
    end] = "has to return the answer that it made",
    [function()
      answer = server:answer()
      return server:answer()
    end] = "the request has an answer already",
  }
  for handler, expected in pairs(handlers) do
    local one = clients.start(port, request("GET", "/"))
    local fine, problem = true, nil
    check.ok(clients.drive(function()
      fine, problem = pcall(server.poll, server, handler, 10)
    end, function() return not fine end), expected)
    check.ok(tostring(problem):find(expected, 1, true), tostring(problem))
    check.ok(clients.drive(function() server:poll(handler, 10) end, one))
    check.equal(one:reply(), nil)
  end
  check.ok(answer.gone)
  check.fails(function() server:poll(nil, 10) end, "poll: argument 2: expected a function, got nil")
  check.fails(function() server:poll(print) end, "poll: argument 3: expected a number, got nothing")
  check.fails(function() http.listen("127.0.0.1", 0, { size = 1 }) end, "size")
  check.fails(function() http.listen("127.0.0.1", 0, { body = -1 }) end, "option body: expected an integer in [0, ")
  server:close()
  check.fails(function() server:poll(print, 10) end, "poll: the server is closed")
end)

check.test("the end of a server that has clients", function()
  local answers = {}
  local server, port, drive
  local function handler(_, path)
    answers[path] = server:answer()
    if path == "/2" then answers[path]:stream(200, plain) end
    return answers[path]
  end
  server, port, drive = serve(handler)
  local one, two = clients.start(port, request("GET", "/1")), clients.start(port, request("GET", "/2"))
  local three = clients.start(port, "GET / HT")
  check.ok(drive(function() return answers["/1"] and answers["/2"] end))
  answers["/2"]:write "some"
  server:close()
  server:close()
  check.equal({ answers["/1"].gone, answers["/2"].gone, answers["/2"]:write "x" }, { true, true })
  check.ok(clients.drive(function() ty.system.sleep(0.02) end, one, two, three))
  check.equal(one:reply(), nil)
  local forgotten = serve(handler) -- nobody closes it
  forgotten:poll(handler, 0)
end)

check.finish()

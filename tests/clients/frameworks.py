"""Calls of agent frameworks, as their users write them.

A framework's function takes the address of a server and the model's name, and gives its calls by
name: functions that return what the user gets.
"""

import asyncio
import functools
import json
import pathlib
import shutil
import subprocess
import sys

SYSTEM = "You answer in one sentence."
ASK = "What is the capital of Switzerland? The capital of Switzerland is"
MOST = 24


def capital(country: str) -> str:
    """Looks up the capital of a country."""
    return f"the capital of {country}"


def openai_python(url, model):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
    function = {"name": "capital", "description": capital.__doc__, "parameters": {
        "type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "c1", "type": "function", "function": {"name": "capital", "arguments": '{"country": "CH"}'}}
    history = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "Bern"}]

    def chat(**more):
        answer = client.chat.completions.create(
            **{"model": model, "messages": messages, "temperature": 0, "max_tokens": MOST, **more})
        if more.get("stream"):
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        return [(choice.message.content, choice.message.tool_calls) for choice in answer.choices]

    def respond(**more):
        """What a response says: status, tokens, and items without ids; of a stream its pieces and its last event."""
        answer = client.responses.create(
            **{"model": model, "input": ASK, "instructions": SYSTEM, "temperature": 0, "max_output_tokens": MOST, **more})
        pieces = []
        if more.get("stream"):
            events = list(answer)
            pieces, answer = [event.delta for event in events if event.type.endswith(".delta")], events[-1].response
        said = [(item.type, getattr(item, "status", None), getattr(item, "name", None), getattr(item, "arguments", None))
                for item in answer.output]
        return answer.status, answer.usage.output_tokens, said, answer.output_text, "".join(pieces)

    flat = [{"type": "function", **function}]
    turn = [{"role": "user", "content": ASK},
            {"type": "function_call", "call_id": "c1", "name": "capital", "arguments": '{"country": "CH"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "Bern"}]
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object"}}}
    return {
        "chat": chat,
        "stream": lambda: chat(stream=True, stream_options={"include_usage": True}),
        "tools": lambda: chat(tools=tools),
        "tools, streamed": lambda: chat(tools=tools, stream=True),
        "tool results in the history": lambda: chat(messages=history, tools=tools),
        "tool_choice none": lambda: chat(tools=tools, tool_choice="none"),
        "a forced tool": lambda: chat(tools=tools, tool_choice="required"),
        "json_schema": lambda: chat(response_format=schema),
        "n": lambda: chat(n=2, temperature=0.7),
        "completion": lambda: client.completions.create(
            model=model, prompt=ASK, max_tokens=MOST, temperature=0).choices[0].text,
        "responses": respond,
        "responses, streamed": lambda: respond(stream=True),
        "responses, tools": lambda: respond(tools=flat),
        "responses, tools, streamed": lambda: respond(tools=flat, stream=True),
        "responses, tool results in the history": lambda: respond(input=turn, tools=flat),
        "responses, a stored one": lambda: respond(previous_response_id="resp_1"),
    }


def langchain(url, model):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: str

    llm = ChatOpenAI(base_url=f"{url}/v1", api_key="key", model=model, temperature=0, max_tokens=MOST, max_retries=0)
    return {
        "invoke": lambda: llm.invoke(ASK).content,
        "stream": lambda: "".join(chunk.content for chunk in llm.stream(ASK)),
        "batch": lambda: [answer.content for answer in llm.batch([ASK, SYSTEM], config={"max_concurrency": 1})],
        "tools": lambda: said(llm.bind_tools([capital]).invoke(ASK)),
        "agent": lambda: said(create_agent(llm, tools=[capital], system_prompt=SYSTEM).invoke(
            {"messages": [{"role": "user", "content": ASK}]})["messages"][-1]),
        "structured output": lambda: llm.with_structured_output(Answer).invoke(ASK),
        "responses": lambda: ChatOpenAI(base_url=f"{url}/v1", api_key="key", model=model, use_responses_api=True,
                                        temperature=0, max_tokens=MOST, max_retries=0).invoke(ASK).text,
    }


def said(message):
    return message.content, [(call["name"], call["args"]) for call in message.tool_calls]


def llama_index(url, model):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(api_base=f"{url}/v1", api_key="key", model=model, is_chat_model=True, temperature=0,
                     max_tokens=MOST, max_retries=0)
    messages = [ChatMessage(role="user", content=ASK)]
    return {
        "complete": lambda: llm.complete(ASK).text,
        "chat": lambda: llm.chat(messages).message.content,
        "stream_complete": lambda: "".join(piece.delta or "" for piece in llm.stream_complete(ASK)),
        "stream_chat": lambda: "".join(piece.delta or "" for piece in llm.stream_chat(messages)),
    }


def instructor(url, model):
    import instructor as library
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: str

    def ask(mode):
        client = library.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0), mode=mode)
        return client.chat.completions.create(model=model, response_model=Answer, temperature=0, max_tokens=MOST,
                                              max_retries=1, messages=[{"role": "user", "content": ASK}])

    return {mode.name: lambda mode=mode: ask(mode) for mode in
            (library.Mode.MD_JSON, library.Mode.TOOLS, library.Mode.JSON, library.Mode.JSON_SCHEMA)}


def pydantic_ai(url, model):
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        city: str

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="key")
    chat = OpenAIChatModel(model, provider=provider)

    def run(served=chat, **more):
        agent = Agent(served, system_prompt=SYSTEM, retries=0, model_settings={"temperature": 0, "max_tokens": MOST},
                      **more)
        return agent.run_sync(ASK).output

    async def stream(**more):
        agent = Agent(chat, system_prompt=SYSTEM, model_settings={"temperature": 0, "max_tokens": MOST}, **more)
        async with agent.run_stream(ASK) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    return {
        "run": run,
        "stream": lambda: asyncio.run(stream()),
        "tools": lambda: run(tools=[capital]),
        "tools, streamed": lambda: asyncio.run(stream(tools=[capital])),
        "output type": lambda: run(output_type=Answer),
        "native output": lambda: run(output_type=NativeOutput(Answer)),
        "responses": lambda: run(OpenAIResponsesModel(model, provider=provider)),
    }


def openai_agents(url, model):
    import agents
    import openai
    from pydantic import BaseModel

    agents.set_tracing_disabled(True)
    def chat(api=agents.OpenAIChatCompletionsModel):
        # A client belongs to one event loop, and each call has its own.
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        return api(model=model, openai_client=client)

    class Answer(BaseModel):
        city: str

    def agent(api=agents.OpenAIChatCompletionsModel, stop=None, **more):
        limit = {"extra_body": {"stop": stop}} if stop else {"max_tokens": MOST}
        settings = agents.ModelSettings(temperature=0, **limit)
        return agents.Agent(name="one", instructions=SYSTEM, model=chat(api), model_settings=settings, **more)

    def run(asked):
        return asyncio.run(agents.Runner.run(asked, ASK, max_turns=2)).final_output

    async def stream(asked):
        result = agents.Runner.run_streamed(asked, ASK, max_turns=2)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return {
        "run": lambda: run(agent()),
        "streamed": lambda: asyncio.run(stream(agent())),
        "tools": lambda: run(agent(tools=[agents.function_tool(capital, strict_mode=False)])),
        "strict tools": lambda: run(agent(tools=[agents.function_tool(capital)])),
        "handoff": lambda: run(agent(handoffs=[agents.Agent(name="two", model=chat(), instructions=SYSTEM)])),
        "output type": lambda: run(agent(output_type=Answer)),
        "responses": lambda: run(agent(agents.OpenAIResponsesModel)),
        # By a stop text: a stream that a limit cuts is an error to it.
        "responses, streamed": lambda: asyncio.run(stream(agent(agents.OpenAIResponsesModel, stop=["e"]))),
        "responses, tools": lambda: run(agent(agents.OpenAIResponsesModel, tools=[
            agents.function_tool(capital, strict_mode=False)])),
    }


def anthropic(url, model):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
    asked = [{"role": "user", "content": ASK}]
    tools = [{"name": "capital", "description": capital.__doc__, "input_schema": {
        "type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}}]
    history = [*asked,
               {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "capital", "input": {"country": "CH"}}]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Bern"}]}]

    def blocks(message):
        """What a message says: reasons, tokens, and blocks without ids and signatures."""
        said = [(block.type, getattr(block, "text", None), getattr(block, "thinking", None), getattr(block, "name", None),
                 getattr(block, "input", None)) for block in message.content]
        return message.stop_reason, message.usage.output_tokens, said

    def ask(streamed=False, **more):
        body = {"model": model, "max_tokens": MOST, "messages": asked, "system": SYSTEM,
                "extra_body": {"temperature": 0}, **more}
        if not streamed:
            return blocks(client.messages.create(**body))
        with client.messages.stream(**body) as stream:
            return blocks(stream.get_final_message())

    return {
        "message": ask,
        "stream": lambda: ask(True),
        "tools": lambda: ask(tools=tools),
        "tools, streamed": lambda: ask(True, tools=tools),
        "tool results in the history": lambda: ask(messages=history, tools=tools),
        "stop sequence": lambda: ask(stop_sequences=["Bern"]),
        "a forced tool": lambda: ask(tools=tools, tool_choice={"type": "any"}),
        "an error": lambda: ask(messages=[{"role": "user", "content": [{"type": "document", "source": {
            "type": "text", "media_type": "text/plain", "data": "x"}}]}]),
    }


def openai_node(url, model):
    program = pathlib.Path(__file__).parent / "node/calls.mjs"
    node = subprocess.Popen(["node", program, sys.prefix, f"{url}/v1", model], text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE)

    def ask(name):
        print(name, file=node.stdin, flush=True)
        return json.loads(node.stdout.readline())

    return {name: functools.partial(ask, name) for name in json.loads(node.stdout.readline())}


def absent(framework):
    """Reason why a framework cannot run here; None if it can."""
    if framework != "openai-node":
        return None
    if not shutil.which("node"):
        return "node is not installed"
    installed = (pathlib.Path(sys.prefix) / "node_modules/openai").is_dir()
    return None if installed else "npm, which brings its package, was not installed"


FRAMEWORKS = {"openai-python": openai_python, "anthropic": anthropic, "openai-node": openai_node, "LangChain": langchain,
              "llama-index": llama_index, "instructor": instructor, "pydantic-ai": pydantic_ai, "openai-agents": openai_agents}
